"""`rehead check`."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from rehead.cli.app import DEVICE, LENGTH, Json, app, say
from rehead.errors import InvalidInput

if TYPE_CHECKING:
    from rehead.data import Ids
    from rehead.tokenizer import OpenedModel


@app.command
def check(
    folder: Annotated[Path, Parameter(help="a model or run folder")],
    *,
    dtype: Annotated[
        tuple[Literal["fp16", "bf16", "q8_0"], ...],
        Parameter(
            negative="",
            help="number format to serve in; may be repeated. q8_0 is llama.cpp's 8-bit format "
            "[default: all three]",
        ),
    ] = (),
    data: Annotated[
        Path | None,
        Parameter(
            help="a text file, a folder of them, or a corpus (python-docs, shakespeare) to compare on "
            "[default: a run's own text, otherwise python-docs]"
        ),
    ] = None,
    length: Annotated[int | None, Parameter(help=f"tokens per block {LENGTH}")] = None,
    device: Annotated[str, Parameter(help=DEVICE)] = "auto",
    json: Json = False,
) -> None:
    """Say whether a model can be served in a smaller number format.

    Round the weights as a file of each format would, and compare the predictions
    with those of the exact weights, in float32, on up to 4,096 tokens or one block. For fp16 and bf16,
    also compute in that format, as engines do, on 1,024 tokens or one block. A format is safe if the mean
    KL is at most 0.01 nats; otherwise the verdict is NOT SAFE, and the exit status is still 0. For example:

        rehead check out/run
        rehead check out/llama --dtype q8_0 --data input.txt
    """
    import torch

    from rehead.conversion.finite import require_finite
    from rehead.measure.length import text_length
    from rehead.measure.served import compared, verdicts
    from rehead.report.progress import Board
    from rehead.report.served import counted, present
    from rehead.system.device import choose_device
    from rehead.tokenizer import open_model

    chosen = choose_device(device)
    kinds = list(dict.fromkeys(dtype)) or ["fp16", "bf16", "q8_0"]
    with tempfile.TemporaryDirectory() as scratch, Board(f"checking {folder}"):
        opened = open_model(folder, device=chosen, dtype=torch.float32)
        require_finite(opened.model)
        length = text_length(opened.model.config, length, folder)
        name, ids = _text(folder, opened, data, length, Path(scratch))
        found = verdicts(opened.model, kinds, ids, length, opened.require_tokenizer().bos)
    tokens = compared(ids, length)
    document = {
        "model": str(folder),
        "text": name,
        "length": length,
        "blocks": -(-tokens // length),
        "tokens": tokens,
        "safe": all(verdict.safe for verdict in found),
        "formats": {verdict.dtype: {"safe": verdict.safe, **asdict(verdict)} for verdict in found},
    }
    if json:
        say(document, "", json)
    else:
        present(f"{folder} on {name}, {counted(tokens)} in blocks of up to {length:,}", found)


def _text(
    folder: Path, opened: "OpenedModel", data: Path | None, length: int, scratch: Path
) -> tuple[str, "Ids"]:
    """Return the name of the text to compare on, and its ids."""
    from rehead.conversion.reading import Reader
    from rehead.data import named, tokenize
    from rehead.data.text import EMBEDDED

    tokenizer = opened.require_tokenizer()
    if data is None:
        own = Reader(folder, opened, length, 0, scratch).texts((), None)
        text = own.test or next(iter(own.calibration), None)
        if text is not None:
            return text.name, text.ids
    name = EMBEDDED if data is None else str(data)
    try:
        return name, tokenize(named(name, "--data"), tokenizer, scratch / "tokens.bin").ids
    except InvalidInput as error:
        if data is not None:
            raise
        raise InvalidInput(f"this model cannot read {name} ({error}) Give --data TEXT.") from error
