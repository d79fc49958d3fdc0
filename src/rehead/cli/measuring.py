"""`rehead inspect` and `rehead bench`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rehead.cli.app import DEVICE, LENGTH, Dtype, Json, app, say, shown, torch_dtype
from rehead.errors import InvalidInput, ResourceError


@app.command
def inspect(
    model: Annotated[Path, Parameter(help="a model or run folder")],
    *,
    text: Annotated[str, Parameter(help="the text to inspect")],
    compare: Annotated[
        str | None,
        Parameter(help="a second text; the rows of its shared beginning with --text should be the same"),
    ] = None,
    layer: Annotated[int, Parameter(help="the layer whose map is printed, from 0")] = 0,
    head: Annotated[int, Parameter(help="the head whose map is printed, from 0")] = 0,
    html: Annotated[Path | None, Parameter(help="write an HTML page with all layers and heads")] = None,
    length: Annotated[
        int, Parameter(name=("--length", "--max-tokens"), help="read at most this many tokens of a text")
    ] = 256,
    device: Annotated[str, Parameter(help=DEVICE)] = "auto",
    json: Json = False,
) -> None:
    """Show the attention map of one head on a text, and how widely each head attends.

    Computed in float32. For example:

        rehead inspect out/run --text "Hope is a waking dream" --compare "Hope is a waking dream and"
    """
    import torch

    from rehead.checkpoint.files.publish import require_folders
    from rehead.data.files import write_whole
    from rehead.measure import inspection
    from rehead.report.inspection import html as make_page
    from rehead.report.inspection import present
    from rehead.report.page import is_page
    from rehead.report.progress import Board
    from rehead.system.device import choose_device
    from rehead.tokenizer import open_model

    if html is not None and html.is_file() and not is_page(html):
        raise InvalidInput(f"--html {html} exists and was not written by rehead: choose another name.")
    texts = [text] if compare is None else [text, compare]
    with Board(f"inspecting {model}"):
        opened = open_model(model, device=choose_device(device), dtype=torch.float32)
        read, tokenizer = opened.model, opened.require_tokenizer()
        inspections = [inspection.inspect(read, tokenizer, each, length) for each in texts]
    change = None if compare is None else inspection.compare(*inspections)
    document = inspection.document(inspections, change, layer, head)
    if html is not None:
        require_folders(html)
        try:
            write_whole(
                html, [make_page(f"Attention of {model.name}", inspections, change, layer, head).encode()]
            )
        except OSError as error:
            raise ResourceError(
                f"cannot write {html} ({error.strerror}): give --html a file in a folder that you can write to."
            ) from error
        document["html"] = str(html)
    if json:
        say(document, "", json)
    else:
        present(inspections, change, layer, head)
        if html is not None:
            print(shown(f"page     {html}"))


@app.command
def bench(
    model: Annotated[Path, Parameter(help="a model or run folder")],
    *,
    prompt_lengths: Annotated[
        tuple[int, ...],
        Parameter(
            negative="",
            consume_multiple=1,
            help="tokens in the prompt [default: an eighth and half of --length]",
        ),
    ] = (),
    length: Annotated[
        int | None, Parameter(help=f"context length from which the other defaults follow {LENGTH}")
    ] = None,
    batch: Annotated[
        tuple[int, ...], Parameter(negative="", consume_multiple=1, help="sequences at once [default: 1]")
    ] = (1,),
    new_tokens: Annotated[
        int | None, Parameter(help="tokens to generate [default: 32, or half of --length if less]")
    ] = None,
    rounds: Annotated[int, Parameter(help="generations with and without a cache, in alternating order")] = 5,
    dtype: Annotated[Dtype | None, Parameter(help="number format of the weights [default: as saved]")] = None,
    explain: Annotated[bool, Parameter(negative="", help="print which code runs, and why")] = False,
    device: Annotated[str, Parameter(help=DEVICE)] = "auto",
    json: Json = False,
) -> None:
    """Time prefill and decoding with and without a cache, and measure memory.

    Generation is greedy, after random tokens. The same rounds measure the machine
    (memory bandwidth and matrix products), so that each figure can be compared
    with what was possible. For example:

        rehead bench out/run --prompt-lengths 16 64 --batch 1 8 --new-tokens 32
    """
    from rehead.checkpoint import load
    from rehead.measure.bench import bench as measure
    from rehead.measure.bench import require_sizes, usual_sizes
    from rehead.measure.environment import environment
    from rehead.measure.explain import explain_all
    from rehead.measure.length import text_length
    from rehead.report.bench import present
    from rehead.report.progress import Board
    from rehead.system.device import choose_device

    with Board(f"loading {model}"):
        read = load(model, device=choose_device(device), dtype=None if dtype is None else torch_dtype(dtype))
        length = text_length(read.config, length, model)
        usual_lengths, usual_new = usual_sizes(length)
        lengths, n_new = prompt_lengths or usual_lengths, usual_new if new_tokens is None else new_tokens
        batch = batch or (1,)  # an empty list, []
        each = [(length, many, n_new, rounds) for many in batch for length in lengths]
        for sizes in each:
            require_sizes(read, *sizes)
    reasons = explain_all(read, batch) if explain else []
    if reasons and not json:
        print(*reasons, sep="\n", flush=True)
    with Board(f"timing {model}"):
        cases = [measure(read, *sizes) for sizes in each]
    facts = {
        "model": str(model),
        "device": str(read.device),
        "dtype": str(read.head.weight.dtype)[6:],
        "length": length,
    }
    document = facts | {
        "rounds": rounds,
        "cases": [asdict(case) for case in cases],
        "environment": environment(read.device),
    }
    if json:
        say(document | {"explain": reasons} if explain else document, "", json)
    else:
        present(f"{model} on {facts['device']} in {facts['dtype']}, length {length:,}", cases)
