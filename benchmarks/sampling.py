"""`--calibration self` beside transformers: texts drawn from a model, at once and from their first token.

    python benchmarks/sampling.py MODEL --count 24 --length 1024

Both draw in float32 at temperature 1 from the whole vocabulary, after the same random first tokens, with all threads;
one after the other, ours once more at the end, each in a process of its own, whose peak of memory is printed beside it.
"""

import argparse
import multiprocessing
import time
from pathlib import Path

import torch

from rehead.tokenizer import open_model


def ours(folder: Path, count: int, length: int) -> None:
    """Draw the texts as `convert` does."""
    from rehead.conversion.texts import sampled

    model = open_model(folder, dtype=torch.float32).model
    begin = time.perf_counter()
    sampled(model, count * length, length, seed=0)
    report("rehead", count, length, begin)


def theirs(folder: Path, count: int, length: int) -> None:
    """Draw as many tokens by `generate` of transformers; an end of text ends nothing."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first = torch.randint(model.config.vocab_size, (count, 1), generator=torch.Generator().manual_seed(0))
    begin = time.perf_counter()
    drawn = model.generate(
        first, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_length=length, eos_token_id=-1
    )
    assert drawn.shape == (count, length)
    report("transformers", count, length, begin)


def report(name: str, count: int, length: int, begin: float) -> None:
    """Print what one way took."""
    seconds = time.perf_counter() - begin
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    print(
        f"{name}: {seconds:.0f} s, {1000 * seconds / (length - 1):.0f} ms per token of all {count} texts, "
        f"peak {peak / 1e6:.2f} GB",
        flush=True,
    )


def main() -> None:
    """Run ours, theirs and ours again."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024)
    given = parser.parse_args()
    for way in (ours, theirs, ours):
        process = multiprocessing.get_context("spawn").Process(
            target=way, args=(given.model, given.count, given.length)
        )
        process.start()
        process.join()


if __name__ == "__main__":
    main()
