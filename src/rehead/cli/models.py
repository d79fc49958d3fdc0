"""`rehead generate`, `rehead eval` and `rehead env`."""

from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rehead.cli.app import DEVICE, LENGTH, Dtype, Json, KVFormat, app, say, shown, torch_dtype
from rehead.cli.tasks import evaluate_tasks
from rehead.cli.text import evaluate_data
from rehead.errors import UsageError

MOST_SAMPLES = 10_000


@app.command
def generate(
    folder: Annotated[Path, Parameter(help="a model or run folder")],
    *,
    prompt: Annotated[tuple[str, ...], Parameter(negative="", help="the text to continue; may be repeated")],
    max_new_tokens: Annotated[int, Parameter(help="tokens to write after the prompt")] = 200,
    temperature: Annotated[
        float,
        Parameter(help="divides the logits: 0 takes the likeliest token, 1 keeps the model's probabilities"),
    ] = 1.0,
    top_k: Annotated[
        int | None, Parameter(help="sample from this many of the likeliest tokens [default: all]")
    ] = None,
    top_p: Annotated[
        float | None,
        Parameter(help="sample from the likeliest tokens whose probabilities add up to this [default: all]"),
    ] = None,
    seed: Annotated[int, Parameter(help="seed of the random numbers; the same seed gives the same text")] = 0,
    samples: Annotated[int, Parameter(help="texts per prompt, with seeds SEED, SEED + 1, ...")] = 1,
    cache: Annotated[
        bool, Parameter(help="cache keys and values; otherwise every step recomputes the whole text")
    ] = True,
    ignore_eos: Annotated[
        bool, Parameter(negative="", help="do not stop at ids that end a text (the folder's eos_token_id)")
    ] = False,
    dtype: Annotated[
        Dtype | None,
        Parameter(help="number format of the weights and of the computation [default: as saved]"),
    ] = None,
    device: Annotated[str, Parameter(help=DEVICE)] = "auto",
    json: Json = False,
) -> None:
    """Generate text after one or more prompts.

    Temperature 0 always takes the likeliest token. The same seed gives the same
    text, even with several prompts at once. A text stops before an end-of-text id
    (the folder's eos_token_id) or after --max-new-tokens. For example:

        rehead generate out/run --prompt "O God, O God!" --max-new-tokens 100 --temperature 0.8
    """
    import torch

    from rehead.decoding import prepare
    from rehead.generation import stream, until
    from rehead.measure.forecast import generation_bytes
    from rehead.report.progress import Board
    from rehead.stages import staged
    from rehead.system.device import choose_device
    from rehead.system.memory import require_memory
    from rehead.tokenizer import open_model

    if not 1 <= samples <= MOST_SAMPLES:
        raise UsageError(f"--samples {samples}: the number of texts per prompt. Use 1 to {MOST_SAMPLES:,}.")
    if not 0 <= seed < 2**63 - samples:
        raise UsageError(f"--seed {seed}. Use 0 to {2**63 - 1 - samples}.")
    chosen = choose_device(device)
    with Board():
        opened = open_model(folder, device=chosen, dtype=None if dtype is None else torch_dtype(dtype))
    model, tokenizer = opened.model, opened.require_tokenizer()
    prompt = tuple(text for text in prompt for _ in range(samples))
    ids = [torch.from_numpy(tokenizer.encode(text, special_tokens=True)) for text in prompt]
    seeds = [seed + n for n in range(samples)] * (len(prompt) // samples)
    tokens = stream(
        model, ids, max_new_tokens, temperature, top_k=top_k, top_p=top_p, seed=seeds, use_cache=cache
    )
    longest = max(map(len, ids))
    parts = generation_bytes(
        model.config,
        len(ids),
        longest,
        max_new_tokens,
        model.head.weight.dtype,
        use_cache=cache,
        n_distinct=len({tuple(each.tolist()) for each in ids}),
        ragged=len(set(map(len, ids))) > 1,
    )
    work = f"{len(ids)} texts of {longest:,} tokens and {max_new_tokens:,} new ones"
    require_memory(work, parts, "Use fewer prompts, or a smaller --max-new-tokens.", model.device)
    prepare(model)
    ends = frozenset[int]() if ignore_eos else opened.ends
    tokens = until(tokens, ends)
    if len(prompt) == 1 and not json:
        with Board():
            first = list(
                staged(islice(tokens, 1), "reading the prompt", longest, "tokens", lambda _: longest)
            )
        print(shown(prompt[0]), end="", flush=True)
        only = (int(token[0]) for token in chain(first, tokens))
        for piece in tokenizer.stream(takewhile(lambda token: token not in ends, only), after=ids[0]):
            print(shown(piece), end="", flush=True)
        print()
        return
    with Board():
        written = [token.tolist() for token in staged(tokens, "generate", max_new_tokens, "tokens")]
    whole = list(zip(*written, strict=True)) or [()] * len(prompt)
    rows = [list(takewhile(lambda token: token not in ends, row)) for row in whole]
    texts = ["".join(tokenizer.stream(row, after=begin)) for row, begin in zip(rows, ids, strict=True)]
    results = [
        {
            "prompt": text,
            "completion": more,
            "finish_reason": "length" if len(row) == max_new_tokens else "stop",
        }
        for text, more, row in zip(prompt, texts, rows, strict=True)
    ]
    say(
        {"results": results},
        "\n---\n".join(text + more for text, more in zip(prompt, texts, strict=True)),
        json,
    )


@app.command
def eval(
    folder: Annotated[Path, Parameter(help="a model or run folder")],
    *,
    data: Annotated[Path | None, Parameter(help="a text file, or a folder of them")] = None,
    tasks: Annotated[
        str | None,
        Parameter(
            help="instead of a text: tasks of lm-evaluation-harness, separated by commas; each is a name, a "
            "YAML file, or a folder of YAML files"
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None, Parameter(help="with --tasks: examples in each prompt [default: as the task says]")
    ] = None,
    limit: Annotated[
        int | None, Parameter(help="with --tasks: documents of each task, at most [default: all]")
    ] = None,
    length: Annotated[
        int | None,
        Parameter(
            help="tokens per block: the most that a prediction can look back on; with --tasks the default is "
            f"the model's own length {LENGTH}"
        ),
    ] = None,
    stride: Annotated[
        int | None,
        Parameter(
            help="tokens from the start of one block to the start of the next; if fewer than the length, "
            "blocks overlap and only new tokens are predicted [default: the length]"
        ),
    ] = None,
    bos: Annotated[
        bool,
        Parameter(
            help="begin every block with the token that the tokenizer puts before a text, if it has one, "
            "since everything else that the model is given begins with it"
        ),
    ] = True,
    batch_size: Annotated[
        int | None,
        Parameter(
            help="blocks per batch, or prompts of a task; fewer need less memory [default: what suits the memory, at "
            "most 32 blocks and 8,192 tokens, or 16 prompts]"
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        Parameter(
            help="number format of the weights and of the computation [default: as saved; fp32 with --stored-as]"
        ),
    ] = None,
    stored_as: Annotated[
        Literal["fp16", "bf16", "q8_0"] | None,
        Parameter(
            help="round the weights as a file of this format would, and also measure how much that changes "
            "the predictions on the same tokens; q8_0 is llama.cpp's 8-bit format"
        ),
    ] = None,
    kv_dtype: Annotated[
        KVFormat | None,
        Parameter(help="round what an engine would cache to this format, for every prediction"),
    ] = None,
    device: Annotated[str, Parameter(help=DEVICE)] = "auto",
    json: Json = False,
) -> None:
    """Measure how well a model predicts a text (loss, perplexity, bits per byte), or how it does on tasks.

    The text is read in blocks of --length tokens; every token but the first is
    predicted once. A --stride below the length gives each prediction more tokens to
    look back on: slower, and a lower loss. Warns if the run was trained on the text.
    --stored-as shows what serving the weights in a smaller format would cost,
    --kv-dtype what keeping the KV cache in one would. --tasks runs lm-evaluation-harness
    (pip install "rehead[eval]") as it runs on a stock model. A task can run code of its own.
    For example:

        rehead eval out/run --data input.txt
        rehead eval out/run --data input.txt --length 128 --stride 64
        rehead eval out/run --data input.txt --stored-as q8_0
        rehead eval out/llama --tasks task.yaml --limit 100
    """
    if stored_as is not None and dtype is None:
        dtype = "fp32"  # in 16 bits, the rounding of what is computed would count as well
    if tasks is not None:
        given = {"--data": data, "--stride": stride}
        for option, value in given.items():
            if value is not None:
                raise UsageError(
                    f"{option} {value} with --tasks: a task brings its own texts. Leave one out."
                )
        if kv_dtype is not None:
            raise UsageError(
                f"--kv-dtype {kv_dtype} with --tasks: a cache is rounded for --data alone. Leave one out."
            )
        if not bos:
            raise UsageError("--no-bos with --tasks: a task says how its texts begin. Leave one out.")
        evaluate_tasks(
            folder,
            tasks,
            num_fewshot=num_fewshot,
            limit=limit,
            length=length,
            batch_size=batch_size,
            dtype=dtype,
            stored_as=stored_as,
            device=device,
            json=json,
        )
        return
    if data is None:
        raise UsageError("eval needs --data, a text file or a folder of them, or --tasks.")
    for option, value in {"--num-fewshot": num_fewshot, "--limit": limit}.items():
        if value is not None:
            raise UsageError(f"{option} {value} is for --tasks: a text is read whole. Leave it out.")
    evaluate_data(
        folder,
        data,
        length=length,
        stride=stride,
        bos=bos,
        batch_size=batch_size,
        dtype=dtype,
        stored_as=stored_as,
        kv_dtype=kv_dtype,
        device=device,
        json=json,
    )


@app.command
def env(*, json: Json = False) -> None:
    """Print versions and hardware, for a bug report.

    For example:

        rehead env
    """
    from rehead.measure.environment import environment

    facts = environment()
    say(facts, "\n".join(f"{name:16} {value}" for name, value in facts.items()), json)
