"""A decoded token of several models at one context, in turn: a source and what was converted from it.

    python benchmarks/together.py SOURCE CONVERTED... --context 4096 --batch 1 8

Every model continues the same random prompts. A round times some tokens of each, one model after the other, so that all
see the same machine; times are over the first model's, median and range of the rounds. Beside them: bytes of the cache
per token by formula and as held, what a token reads and computes by formula, over the first model's, too.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from rehead.conversion.page import markdown
from rehead.generation import stream
from rehead.measure.memory_in_use import held_cache_bytes
from rehead.measure.size import decode_bytes, decode_flops, kv_bytes_per_token
from rehead.model import LanguageModel
from rehead.tokenizer import open_model

SHORT = 64
"""Tokens for which the cache is filled to count its bytes: every model's grow linearly."""


def rounds(
    models: list[LanguageModel], batch: int, context: int, tokens: int, count: int
) -> list[list[float]]:
    """Return the seconds per decoded token of each model, one list per round; the first round is not among them."""
    vocabulary = min(model.config.vocab_size for model in models)
    prompts = torch.randint(vocabulary, (batch, context), generator=torch.Generator().manual_seed(0))
    texts = [stream(model, list(prompts), (count + 1) * tokens + 1, 0) for model in models]
    for text in texts:
        next(text)
    return [[timed(text, tokens) for text in texts] for _ in range(count + 1)][1:]


def timed(text: Iterator[torch.Tensor], tokens: int) -> float:
    """Return the seconds that each of the next `tokens` takes."""
    begin = time.perf_counter()
    for _ in range(tokens):
        next(text)
    return (time.perf_counter() - begin) / tokens


def main() -> None:
    """Time all models and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--context", type=int, default=4096, help="tokens before those timed")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=4, help="of each model in a round")
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    models = [open_model(place, dtype=torch.float32).model for place in given.models]
    held = [held_cache_bytes(model, SHORT) / SHORT for model in models]
    rows = []
    for batch in given.batch:
        taken = rounds(models, batch, given.context, given.tokens, given.rounds)
        whole = given.context + given.tokens * (given.rounds + 1) // 2
        work = [
            (decode_bytes(model.config, whole, batch), batch * decode_flops(model.config, whole))
            for model in models
        ]
        for at, (place, model) in enumerate(zip(given.models, models, strict=True)):
            over = [seconds[at] / seconds[0] for seconds in taken]
            rows.append(
                [
                    place.name,
                    f"{batch}",
                    f"{kv_bytes_per_token(model.config):,}",
                    f"{held[at]:,.0f}",
                    f"{work[at][0] / work[0][0]:.2f}",
                    f"{work[at][1] / work[0][1]:.2f}",
                    f"{1000 * statistics.median(seconds[at] for seconds in taken):.1f}",
                    f"{statistics.median(over):.2f} [{min(over):.2f}, {max(over):.2f}]",
                ]
            )
    print(
        markdown(
            ["model", "batch", "KV B/token", "held", "bytes read", "FLOPs", "ms/token", "time"],
            rows,
        )
    )


if __name__ == "__main__":
    main()
