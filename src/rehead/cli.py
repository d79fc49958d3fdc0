"""argv into one call per command. Nothing here computes; torch is imported only by what needs it."""

import io
import json as jsonlib
import os
import re
import sys
import tempfile
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

from rehead import __version__
from rehead.errors import ReheadError, ResourceError, UsageError

OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|not enough memory|Storage size calculation")
"""How torch says it, which has no error class for it on every device."""
LONGEST = 290
"""Characters of an error; a longer one (its path, mostly) loses its middle."""

Json = Annotated[bool, Parameter(name="--json", negative="", help="print one JSON document on stdout")]
app = App(
    name="rehead",
    version=__version__,
    help="Train, generate with and measure language models by how their heads share keys and values.",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)


@app.command
def train(
    *flags: str,
    config: Annotated[tuple[Path, ...], Parameter(negative="", help="YAML file(s) under the flags")] = (),
    print_config: Annotated[bool, Parameter(negative="", help="print all options and stop")] = False,
    json: Json = False,
) -> None:
    """Train a GPT or an Elman RNN on a text.

    Flags are group.key=value, with or without leading dashes; the groups are
    system, data, model and trainer. `rehead train --print-config` lists all of
    them with their defaults. For example:

    rehead train data.path=input.txt model.n_kv_head=3 model.rope=True
    """
    from rehead.config import flags as reader

    options = reader.read(list(flags), config)
    resumed = Path(options.system.work_dir) / "config.yaml"
    if options.trainer.resume and resumed.is_file():
        options = reader.read(list(flags), (resumed, *config))
    if print_config:
        _say(asdict(options), reader.write(options).rstrip(), json)
        return
    from rehead.report.progress import watch
    from rehead.training import train as run

    last: dict[str, Any] = {}
    for record in watch(run(options), options.trainer.max_iters):
        last = record if record.get("event") == "end" else last
    kind = "validation" if "val_loss" in last else "training"
    loss = last.get("val_loss", last["train_loss"])
    _say(last, f"done: {kind} loss {loss:.4f} nats per token", json)


@app.command
def generate(
    folder: Path,
    *,
    prompt: Annotated[tuple[str, ...], Parameter(negative="", help="once per prompt")],
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    cache: Annotated[bool, Parameter(help="keep keys and values; without, all is computed anew")] = True,
    device: str = "auto",
    json: Json = False,
) -> None:
    """Write text after one or more prompts, with a model folder or a run folder.

    Temperature 0 always takes the likeliest token. The same seed gives the same
    text, also when several prompts are given at once.
    """
    import torch

    from rehead.checkpoint import load, read_at
    from rehead.generate import stream
    from rehead.tokenizer import Tokenizer
    from rehead.training.start import choose_device

    chosen = choose_device(device)
    model, tokenizer = read_at(folder, lambda place: (load(place, device=chosen), Tokenizer.load(place)))
    ids = [torch.from_numpy(tokenizer.encode(text)) for text in prompt]
    tokens = stream(
        model, ids, max_new_tokens, temperature, top_k=top_k, top_p=top_p, seed=seed, use_cache=cache
    )
    if len(prompt) == 1 and not json:
        print(prompt[0], end="", flush=True)
        for piece in tokenizer.stream((int(token[0]) for token in tokens), after=ids[0]):
            print(piece, end="", flush=True)
        print()
        return
    rows = list(zip(*(token.tolist() for token in tokens), strict=True)) or [()] * len(prompt)
    texts = ["".join(tokenizer.stream(row, after=begin)) for row, begin in zip(rows, ids, strict=True)]
    results = [{"prompt": text, "completion": more} for text, more in zip(prompt, texts, strict=True)]
    _say(
        {"results": results},
        "\n---\n".join(text + more for text, more in zip(prompt, texts, strict=True)),
        json,
    )


@app.command
def eval(
    folder: Path,
    *,
    data: Annotated[Path, Parameter(help="a text file, or a folder of them")],
    batch_size: int = 32,
    device: str = "auto",
    json: Json = False,
) -> None:
    """Measure how well a model predicts a text: loss, perplexity, bits per byte.

    The text is read in blocks of the model's length; every token but the first
    is predicted once.
    """
    from rehead.checkpoint import load, read_at
    from rehead.data import Source, evaluation_blocks, require_vocabulary, tokenize
    from rehead.measure import evaluate
    from rehead.measure.quality import scores
    from rehead.tokenizer import Tokenizer
    from rehead.training.start import choose_device

    chosen = choose_device(device)
    model, tokenizer = read_at(folder, lambda place: (load(place, device=chosen), Tokenizer.load(place)))
    with tempfile.TemporaryDirectory() as scratch:
        tokens = tokenize(Source(path=data), tokenizer, Path(scratch) / "tokens.bin")
        require_vocabulary(tokens.ids, model.config.vocab_size)
        blocks = evaluation_blocks(tokens.ids, model.config.block_size, batch_size)
        result = scores(*evaluate(model, blocks), tokens.n_bytes)
    _say(result, "\n".join(f"{name:14} {value:,.6g}" for name, value in result.items()), json)


@app.command
def study(
    *flags: str,
    preset: Annotated[
        str, Parameter(help="a study that comes with rehead, or a YAML file like one")
    ] = "demo",
    json: Json = False,
) -> None:
    """Train several variants of one run and set them side by side: losses, cache bytes, speed, samples.

    Flags are those of `rehead train` and hold for every variant; system.work_dir
    is where all of it goes (runs/PRESET). Variants that are done are not trained
    again.
    """
    from rehead.report.progress import watch
    from rehead.report.side_by_side import present
    from rehead.study import Preset
    from rehead.study import study as run

    chosen = Preset.read(preset)
    document = run(chosen, list(flags), watch)
    if json:
        _say(document, "", json)
    else:
        present(document, chosen.work_dir(list(flags)))


@app.command
def plan(
    model: Annotated[Path, Parameter(help="a model or run folder, a config.json, or a YAML of options")],
    *,
    context: Annotated[int | None, Parameter(help="tokens in the cache; the model's block_size")] = None,
    batch: int = 1,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    json: Json = False,
) -> None:
    """Show what each variant of a model would cost, and what converting to it would be.

    FLOPs and bytes are those of one decoded token per sequence. A conversion is exact, approximate,
    impossible, or pointless where it would not shrink the cache.
    """
    import torch

    from rehead.conversion.folder import read_plannable
    from rehead.conversion.plan import plan as make
    from rehead.report.conversion import present_plan

    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    config = read_plannable(model)
    found = make(config, config.block_size if context is None else context, batch, types[dtype])
    if json:
        _say(asdict(found), "", json)
    else:
        present_plan(found)


@app.command
def convert(
    source: Path,
    destination: Path,
    *,
    to: Annotated[
        Literal["mha", "gqa", "mqa", "mla", "reduced"] | None, Parameter(help="left out, the kind stays")
    ] = None,
    n_kv_head: Annotated[int | None, Parameter(help="KV heads, for gqa and mla")] = None,
    kv_rank: Annotated[int | None, Parameter(help="numbers of the latent; all it needs to be exact")] = None,
    kv_fraction: Annotated[float | None, Parameter(help="the same as a share of the present cache")] = None,
    max_loss: Annotated[
        float | None, Parameter(help="smallest latents that cost no more nats per token")
    ] = None,
    measured_ranks: Annotated[
        bool, Parameter(negative="", help="with --kv-fraction: a rank for each layer, by measuring")
    ] = False,
    method: Annotated[
        Literal["weighted", "whitened", "svd", "procrustes", "mean", "first"] | None,
        Parameter(help="how to approximate; the best there is evidence for"),
    ] = None,
    head_map: Literal["contiguous", "modular"] | None = None,
    rope_layout: Literal["half-split", "interleaved"] | None = None,
    calibration: Annotated[
        Path | None, Parameter(help="text to fit to; its last tenth is held out unless --test is given")
    ] = None,
    test: Annotated[Path | None, Parameter(help="text to measure on")] = None,
    allow_loss: Annotated[
        bool, Parameter(negative="", help="write the result though it is not exact")
    ] = False,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Turn a model's attention into another kind, with a certificate of what was kept and lost.

    The result is a model folder with conversion.json and CONVERSION.md in it. A run folder brings its
    own text. For example:

    rehead convert out/run out/mla --to mla --kv-fraction 0.5 --allow-loss
    """
    from rehead.conversion import Wish
    from rehead.conversion.folder import convert_folder
    from rehead.report.conversion import present_certificate

    certificate = convert_folder(
        source,
        destination,
        Wish(
            to=to,
            n_kv_head=n_kv_head,
            kv_rank=kv_rank,
            kv_fraction=kv_fraction,
            head_map=head_map,
            rope_layout=rope_layout,
        ),
        method=method,
        calibration=calibration,
        test=test,
        measured_ranks=measured_ranks,
        max_loss=max_loss,
        allow_loss=allow_loss,
        seed=seed,
    )
    if json:
        _say(asdict(certificate), "", json)
    else:
        present_certificate(certificate, destination)


@app.command
def env(*, json: Json = False) -> None:
    """Print versions and hardware, for a bug report."""
    from rehead.measure.environment import environment

    facts = environment()
    _say(facts, "\n".join(f"{name:16} {value}" for name, value in facts.items()), json)


def main(argv: list[str] | None = None) -> int:
    """Run one command line; return its exit status (see `rehead.errors`)."""
    _open_streams()
    argv = [_bare(word) for word in (sys.argv[1:] if argv is None else argv)]
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    if not argv:
        app.help_print()
        return UsageError.exit_code
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        return _run(argv, debug)


def _run(argv: list[str], debug: bool) -> int:
    """Any failure as one line on stderr and an exit status."""
    try:
        _require_text(argv)
        app(argv, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except CycloptsError as error:
        command = f"rehead {argv[0]}" if argv[0] in app else "rehead"
        return _fail(UsageError(f"{error} See {command} --help."), debug)
    except ReheadError as error:
        return _fail(error, debug)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _let_go_of_stdout()
        return 0
    except OSError as error:
        _let_go_of_stdout()
        return _fail(ResourceError(f"{error}: check that place, its permissions and free space."), debug)
    except Exception as error:
        if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)):
            what = f"out of memory ({error!s:.120})"
            return _fail(ResourceError(f"{what}: use a smaller model or batch, or fewer tokens."), debug)
        if debug:
            raise
        with tempfile.NamedTemporaryFile("w", prefix="rehead-", suffix=".log", delete=False) as log:
            traceback.print_exc(file=log)
        print(f"rehead: a bug of ours: {error!r:.150}. The traceback is in {log.name}.", file=sys.stderr)
        return 8
    return 0


def _open_streams() -> None:
    """Write to nowhere where stdout or stderr is closed, and escape what their encoding cannot say."""
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _let_go_of_stdout() -> None:
    """Where stdout is full or gone, do not let the interpreter try once more at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _bare(word: str) -> str:
    """`--model.rope=True` as `model.rope=True`, and ~ behind the = as the home folder."""
    match = re.fullmatch(r"(?:--)?([a-z_]+\.[A-Za-z_.]+)(?:(=)(.*))?", word, re.DOTALL)
    if match is None or not (match[2] or word.startswith("--")):
        return word
    return match[1] + (match[2] or "") + os.path.expanduser(match[3] or "")


def _require_text(argv: list[str]) -> None:
    """Refuse arguments that are empty (as a path they would mean this folder) or no text."""
    for word in argv:
        if re.fullmatch("(--[a-z-]+=)?", word):
            raise UsageError(f"{word!r}: an argument is empty. Give it a value, or leave it out.")
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UsageError(f"{word!r:.200} is not UTF-8: rename it, or set LC_ALL=C.UTF-8.")


def _say(document: dict[str, Any], text: str, json: bool) -> None:
    print(jsonlib.dumps(document) if json else text)


def _warn(message: Warning | str, *where: Any, **more: Any) -> None:
    print(f"rehead: warning: {message}", file=sys.stderr)


def _fail(error: ReheadError, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    text = " ".join(str(error).split())
    if len(text) > LONGEST:
        text = f"{text[:180]} ... {text[-100:]}"
    print(f"rehead: {text}", file=sys.stderr)
    return error.exit_code
