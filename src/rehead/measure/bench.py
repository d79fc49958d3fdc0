"""Times prefill and decoding with and without a cache, against the machine's roofline."""

import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from rehead.errors import UsageError
from rehead.generation import stream
from rehead.measure.forecast import generation_bytes
from rehead.measure.memory_in_use import held_cache_bytes
from rehead.measure.roofline import Roofline, matmul_rate, read_rate
from rehead.measure.size import cache_bytes, decode_bytes, decode_flops, prompt_flops
from rehead.model import LanguageModel
from rehead.stages import staged
from rehead.system.device import synchronize
from rehead.system.memory import require_memory


@dataclass(frozen=True, kw_only=True)
class Times:
    """Median, minimum and maximum of one figure over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Times":
        """Summarise one sample or more."""
        return cls(median=statistics.median(samples), least=min(samples), most=max(samples))


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Results of greedy generation, with or without a cache.

    `prefill` is the time to the first token, `decode` that of each later token, in seconds.
    `tokens_per_second` counts the new tokens of all sequences over both. `forwarded` counts the tokens per
    sequence that went through the model: each token once with a cache, the whole text at each step without.
    """

    prefill: Times
    decode: Times
    tokens_per_second: float
    forwarded: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """Results of one prompt length and batch size.

    Cache bytes are those after the last token, by formula and as held. `peak_bytes` is the most that
    tensors held at once during prefill, including weights and the whole cache. `roofline` is the machine's
    best speed at reading `read_bytes` (what one decoded token needs) and at matrix products. The shares are the
    roofline's time for the same work divided by the measured time, round by round.
    """

    prompt_length: int
    batch_size: int
    new_tokens: int
    cached: Arm
    uncached: Arm
    same_tokens: bool
    cache_bytes_predicted: int
    cache_bytes_held: int
    peak_bytes: int
    read_bytes: int
    roofline: Roofline
    prefill_share: Times
    decode_share: Times


@dataclass
class _Samples:
    """Samples of one arm, one per round."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    forwarded: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    def arm(self, batch_size: int, new_tokens: int) -> Arm:
        seconds = statistics.median(
            first + (new_tokens - 1) * step for first, step in zip(self.prefill, self.decode, strict=True)
        )
        return Arm(
            prefill=Times.of(self.prefill),
            decode=Times.of(self.decode),
            tokens_per_second=batch_size * new_tokens / seconds,
            forwarded=max(self.forwarded),
        )


def usual_sizes(length: int) -> tuple[tuple[int, int], int]:
    """Return prompts of an eighth and half of `length` tokens, and 32 new tokens or as many as fit."""
    return (max(length // 8, 1), max(length // 2, 1)), min(32, max(length // 2, 2))


def require_sizes(
    model: LanguageModel, prompt_length: int, batch_size: int = 1, new_tokens: int = 32, rounds: int = 5
) -> None:
    """Refuse what `bench` cannot time: UsageError for sizes, ResourceError for more than this machine's memory."""
    for name, size, least in (
        ("prompt_length", prompt_length, 1),
        ("batch_size", batch_size, 1),
        ("new_tokens", new_tokens, 2),
        ("rounds", rounds, 1),
    ):
        if size < least:
            raise UsageError(f"{name}={size}. Use {least} or more.")
    limit, whole = model.config.context_limit, prompt_length + new_tokens
    if limit is not None and whole > limit:
        raise UsageError(
            f"prompt_length={prompt_length} and new_tokens={new_tokens} make {whole} tokens, more than the model's "
            f"context of {limit}. Use {limit} or fewer in total."
        )
    config, device, dtype = model.config, model.device, model.head.weight.dtype
    parts = {
        use: generation_bytes(config, batch_size, prompt_length, new_tokens, dtype, use_cache=use)
        for use in (True, False)
    }
    to_read = {"a block to time reading": decode_bytes(config, whole, batch_size, dtype)}
    for held in (to_read, *parts.values()):
        work = f"batch_size={batch_size} with prompts of {prompt_length:,} tokens"
        require_memory(
            work, held, "Use a smaller --batch, or a smaller --length or --prompt-lengths.", device
        )


def bench(
    model: LanguageModel, prompt_length: int, batch_size: int = 1, new_tokens: int = 32, rounds: int = 5
) -> Case:
    """Generate after random prompts with and without a cache, in alternating order, `rounds` times each.

    Each round measures the machine, too. A short generation of each arm goes first, untimed. Raises UsageError
    for sizes that cannot be timed or exceed the model's context, ResourceError for sizes that exceed this
    machine's memory.
    """
    require_sizes(model, prompt_length, batch_size, new_tokens, rounds)
    config, device, dtype = model.config, model.device, model.head.weight.dtype
    whole = prompt_length + new_tokens
    to_read = decode_bytes(config, whole, batch_size, dtype)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(config.vocab_size, (batch_size, prompt_length), generator=generator)
    arms = {True: _Samples(), False: _Samples()}
    roofs = []
    title = f"timing prompts of {prompt_length:,} tokens, batch {batch_size}"
    for index in staged(range(rounds), title, rounds, "rounds"):
        if index == 0:
            for use_cache in arms:
                _generate(model, prompts, 2, use_cache, _Samples())
        roofs.append(Roofline(read=read_rate(to_read, device), matmul=matmul_rate(dtype, device)))
        for use_cache in (True, False) if index % 2 == 0 else (False, True):
            _generate(model, prompts, new_tokens, use_cache, arms[use_cache])
    middle = prompt_length + (new_tokens + 1) // 2
    weights = decode_bytes(config, 0, batch_size * prompt_length, dtype)  # experts that a prompt chooses
    reading = weights, batch_size * prompt_flops(config, prompt_length)
    writing = decode_bytes(config, middle, batch_size, dtype), batch_size * decode_flops(config, middle)
    return Case(
        prompt_length=prompt_length,
        batch_size=batch_size,
        new_tokens=new_tokens,
        cached=arms[True].arm(batch_size, new_tokens),
        uncached=arms[False].arm(batch_size, new_tokens),
        same_tokens=arms[True].tokens == arms[False].tokens,
        cache_bytes_predicted=cache_bytes(config, whole, batch_size, dtype),
        cache_bytes_held=held_cache_bytes(model, whole, batch_size),
        peak_bytes=_peak_bytes(model, prompts, new_tokens),
        read_bytes=to_read,
        roofline=Roofline(
            read=statistics.median(roof.read for roof in roofs),
            matmul=statistics.median(roof.matmul for roof in roofs),
        ),
        prefill_share=_share(roofs, reading, arms[True].prefill),
        decode_share=_share(roofs, writing, arms[True].decode),
    )


def _share(roofs: list[Roofline], work: tuple[int | float, int | float], seconds: list[float]) -> Times:
    """Return the roofline's time for (bytes, FLOPs) divided by the measured time."""
    return Times.of([roof.seconds(*work) / taken for roof, taken in zip(roofs, seconds, strict=True)])


def _peak_bytes(model: LanguageModel, prompts: Int[Tensor, "B L"], new_tokens: int) -> int:
    """Return the peak bytes of all tensors during prefill, with a cache that has room for `new_tokens`."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model)
    tokens = stream(model, list(prompts), new_tokens, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tracker:
            next(tokens)
    return tracker.get_tracker_snapshot("peak")[model.device]["Total"]


def _generate(
    model: LanguageModel, prompts: Int[Tensor, "B L"], n_token: int, use_cache: bool, into: _Samples
) -> None:
    """Time one generation, and append its figures to `into`."""
    with _counted(model) as lengths:
        synchronize(model.device)
        start = time.perf_counter()
        tokens = stream(model, list(prompts), n_token, 0, use_cache=use_cache)
        written = [next(tokens)]
        synchronize(model.device)
        first = time.perf_counter()
        written += tokens
        synchronize(model.device)
        end = time.perf_counter()
    into.prefill.append(first - start)
    into.decode.append((end - first) / (n_token - 1))
    into.forwarded.append(sum(lengths) + n_token - len(lengths))
    into.tokens.append(torch.stack(written).flatten().tolist())


@contextmanager
def _counted(model: LanguageModel) -> Iterator[list[int]]:
    """Collect the length of every text that goes through `model.hidden` within the block.

    A forward hook would make the model fall back to slower decoding, so `hidden` is wrapped instead. Single
    tokens of a decoder do not pass here.
    """
    lengths: list[int] = []
    hidden = model.hidden

    def counting(ids: Tensor, *more: Any, **named: Any) -> Tensor:
        lengths.append(ids.shape[1])
        return hidden(ids, *more, **named)

    model.hidden = counting  # type: ignore[method-assign]
    try:
        yield lengths
    finally:
        del model.hidden
