"""`rehead eval --data`."""

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rehead.cli.app import Dtype, KVFormat, say, torch_dtype, warn
from rehead.errors import UsageError

if TYPE_CHECKING:
    from rehead.measure.stored import Storage


def evaluate_data(
    folder: Path,
    data: Path,
    *,
    length: int | None,
    stride: int | None,
    bos: bool,
    batch_size: int | None,
    dtype: Dtype | None,
    stored_as: "Storage | None",
    kv_dtype: KVFormat | None,
    device: str,
    json: bool,
) -> None:
    """Measure how well the model in a folder predicts a text, and print the results."""
    from rehead.data import Source, tokenize
    from rehead.measure import evaluate_text
    from rehead.measure.kv_dtype import kv_dtypes, rounded_caches
    from rehead.measure.length import text_length
    from rehead.measure.quality import scores
    from rehead.measure.stored import as_stored, changed
    from rehead.report.progress import Board
    from rehead.system.device import choose_device
    from rehead.tokenizer import open_model
    from rehead.training.seen import contains_training_text

    source = Source(path=data, option="--data")
    if folder.is_dir():  # else that is named first
        source.require()
    for name, number in (("length", length), ("stride", stride), ("batch_size", batch_size)):
        if number is not None and number < 1:
            raise UsageError(f"{name}={number}. Use 1 or more.")
    chosen = choose_device(device)
    with tempfile.TemporaryDirectory() as scratch, Board():
        opened = open_model(folder, device=chosen, dtype=None if dtype is None else torch_dtype(dtype))
        model, tokenizer = opened.model, opened.require_tokenizer()
        length = text_length(model.config, length, folder)
        tokens = tokenize(source, tokenizer, Path(scratch) / "tokens.bin")
        exact = model
        if stored_as is not None:
            model = as_stored(exact, stored_as)
        first = tokenizer.bos if bos else None
        sizes = {"length": length, "stride": stride, "batch_size": batch_size}
        found = evaluate_text(model, tokens.ids, **sizes, kv_dtype=kv_dtype, bos=first)
        caches = None if kv_dtype is None else partial(rounded_caches, model, kv_dtypes[kv_dtype]())
        change = {}
        if stored_as is not None:
            change = changed(exact, model, tokens.ids, length, stride, first, caches, batch_size)
        trained_on = contains_training_text(folder, tokens.ids, tokenizer)
    result: dict[str, float | int | str] = {
        **scores(found.loss, found.tokens, tokens.n_bytes),
        "length": found.length,
        "stride": found.stride,
        **({} if first is None else {"bos": tokenizer.token(first)}),
        "dtype": str(model.head.weight.dtype)[6:],
        **({} if kv_dtype is None else {"kv_dtype": kv_dtype}),
        **({} if stored_as is None else {"stored_as": stored_as, **change}),
    }
    if trained_on:
        warn(
            f"{data} contains text that {folder} was trained on or fitted to: expect a higher loss on other text."
        )
    lines = (
        f"{name:14} {value if isinstance(value, str) else format(value, ',' if isinstance(value, int) else ',.6g')}"
        f"{' nats per token' if name == 'loss' else ''}"
        for name, value in result.items()
    )
    say({**result, "contains_training_text": trained_on}, "\n".join(lines), json)
