"""Generates text from a model, token by token, with or without a cache.

In float32 and float64 the tokens are the same either way, and in any batch. In bfloat16 a different order of
operations rounds differently, so near-ties (within 2^-5 of the largest logit) may go to the other token. The same
call on the same machine gives the same tokens in every dtype.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from rehead.attention import EMPTY
from rehead.decoding import decoder, is_intercepted, is_whole
from rehead.errors import ReheadError, UsageError
from rehead.model import LanguageModel, evaluated, evaluating
from rehead.model.base import Decode, require_model, require_one_dtype
from rehead.model.ids import require_ids, require_range
from rehead.sampling import draw, probabilities, require_finite, require_valid

MOST_TOKENS = 10_000_000
"""Maximum number of new tokens per call; memory for all of them is allocated at the start."""
TORCH_SEEDS = 2**32
"""Seeds that torch's generator tells apart; it ignores all higher bits."""


def generate(
    model: LanguageModel,
    ids: Tensor | np.ndarray,
    max_new_tokens: int,
    temperature: int | float = 1.0,
    *,
    top_k: int | None = None,
    top_p: int | float | None = None,
    seed: int | np.integer[Any] | Sequence[int] | None = None,
    use_cache: bool = True,
) -> Int[Tensor, "..."]:
    """Return `ids`, (L,) or (B, L), followed by `max_new_tokens` new ones: (L + new,) or (B, L + new).

    One text is (L,), as `rehead.load_tokenizer(path).encode(text)` returns it; (B, L) are texts of equal length.
    The result is an int64 tensor on the model's device.
    `temperature=0` is greedy. The same `seed` gives the same tokens: one seed for all rows, or one per row.
    Without it the seed comes from torch's global generator. When the context of a model is full, generation
    continues from its later half, with and without a cache alike.
    """
    prompt = require_ids(ids)
    texts = prompt if prompt.dim() == 2 else prompt[None]
    new = list(
        stream(
            model,
            list(texts),
            max_new_tokens,
            temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            use_cache=use_cache,
        )
    )
    whole = torch.cat([texts.to(model.device), *(token[:, None] for token in new)], dim=1)
    return whole if prompt.dim() == 2 else whole[0]


def stream(
    model: LanguageModel,
    prompts: Sequence[Tensor | np.ndarray],
    max_new_tokens: int,
    temperature: int | float = 1.0,
    *,
    top_k: int | None = None,
    top_p: int | float | None = None,
    seed: int | np.integer[Any] | Sequence[int] | None = None,
    use_cache: bool = True,
) -> Iterator[Int[Tensor, " B"]]:
    """Yield the next token of every prompt, (B,), `max_new_tokens` times. Each prompt is (L,) with its own L.

    Each row is computed as if it were alone. The model runs in eval mode and keeps the mode it had.
    Raises UsageError, before the first token, for a prompt that is empty, longer than the context, or
    contains an id outside the vocabulary.
    """
    require_model(model)
    require_valid(temperature, top_k, top_p)
    model.require_generates()
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, Integral):
        raise UsageError(
            f"max_new_tokens={max_new_tokens!r} is not a whole number. Use 0 to {MOST_TOKENS:,}."
        )
    if not 0 <= max_new_tokens <= MOST_TOKENS:
        raise UsageError(f"max_new_tokens={max_new_tokens}. Use 0 to {MOST_TOKENS:,}.")
    if not len(prompts):
        raise UsageError("no prompts: give at least one.")
    if len(prompts) * max_new_tokens > MOST_TOKENS:
        raise UsageError(
            f"max_new_tokens={max_new_tokens} after each of {len(prompts)} prompts makes "
            f"{len(prompts) * max_new_tokens:,} tokens. Use {MOST_TOKENS:,} or fewer in total."
        )
    texts = [require_ids(prompt, f"prompt {row}", dims=(1,)) for row, prompt in enumerate(prompts)]
    contexts = Contexts(model, texts, max_new_tokens)
    noise = _noise(len(prompts), max_new_tokens, seed).to(model.device).T

    def tokens() -> Iterator[Tensor]:
        with evaluating(model) if is_intercepted(model) else nullcontext():
            for step in range(max_new_tokens):
                with torch.inference_mode():
                    logits = contexts.next_logits(use_cache)
                    if temperature == 0:
                        require_finite(logits)
                        token = logits.argmax(dim=-1)
                    else:
                        likely = probabilities(logits, temperature, top_k, top_p)
                        token = draw(likely, noise[step])
                token = token.clone()  # a plain tensor, usable outside inference mode
                contexts.add(token.clone())  # what is yielded is the caller's
                yield token

    return tokens()


def until(tokens: Iterable[Int[Tensor, " B"]], stop: Collection[int]) -> Iterator[Int[Tensor, " B"]]:
    """Yield the tokens of `stream` until every row has had an id in `stop`; a row that has had one repeats it."""
    last: dict[int, Tensor] = {}
    for token in tokens:
        token = token.clone()
        for row, end in last.items():
            token[row] = end
        yield token
        last |= {row: token[row] for row, id in enumerate(token.tolist()) if id in stop}
        if len(last) == len(token):
            return


class Contexts:
    """Holds the tokens of each row, the part of them that the model sees, and the cache of that part.

    With a limit of N tokens, the model sees a text of n > N tokens from a start that moves in strides of
    N/2. The start depends on n alone, so neither the cache nor the other rows change what is generated.
    """

    def __init__(self, model: LanguageModel, prompts: Sequence[Tensor], max_new_tokens: int) -> None:
        self.model, self.limit = model, model.config.context_limit
        for row, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise UsageError(f"prompt {row} is empty: generation needs at least one token to start from.")
            if self.limit is not None and len(prompt) > self.limit:
                raise UsageError(
                    f"prompt {row} has {len(prompt)} tokens and the model's context is {self.limit}: shorten it to "
                    f"{self.limit} tokens."
                )
            require_range(prompt, model.config.vocab_size, f"prompt {row}")
        device = model.device
        self.lengths = [len(prompt) for prompt in prompts]
        longest = max(self.lengths, default=0)
        self.capacity = longest + max_new_tokens
        if self.limit is not None:
            self.capacity = min(self.capacity, self.limit)
        self.ids = torch.zeros(len(prompts), longest + max_new_tokens, dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            self.ids[row, : len(prompt)] = prompt
        self.starts: list[int] | None = None
        self.cache: list[Any] = []
        self.decode: Decode | None = None

    def add(self, token: Int[Tensor, " B"]) -> None:
        """Append one token to every row."""
        if len(set(self.lengths)) == 1:
            self.ids[:, self.lengths[0]] = token
        else:
            self.ids[torch.arange(len(self.lengths)), torch.tensor(self.lengths)] = token
        self.lengths, self.last = [length + 1 for length in self.lengths], token

    def next_logits(self, use_cache: bool) -> Tensor:
        """Return the logits of the token after each row, (B, vocab)."""
        starts = [self._start(length) for length in self.lengths]
        try:
            if use_cache and starts == self.starts:
                self.decode = self.decode or decoder(self.model)
                return self.decode(self.last, self.cache)
            self.starts = starts
            return self._whole(starts, use_cache)
        except (RuntimeError, ReheadError):
            require_one_dtype(self.model)
            raise

    def _start(self, length: int) -> int:
        if self.limit is None or length <= self.limit:
            return 0
        stride = max(self.limit // 2, 1)
        return -(-(length - self.limit) // stride) * stride

    def _whole(self, starts: list[int], use_cache: bool) -> Tensor:
        """Run one pass over what each row sees, padded on the right; with a cache, equal rows are computed once."""
        spans = zip(self.ids, starts, self.lengths, strict=True)
        texts = [ids[start:length] for ids, start, length in spans]
        numbers: dict[object, int] = {}  # of the distinct texts
        keys = [tuple(text.tolist()) if use_cache else row for row, text in enumerate(texts)]
        which = [numbers.setdefault(key, len(numbers)) for key in keys]
        rows = [texts[which.index(number)] for number in range(len(numbers))]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        sizes = torch.tensor([len(row) for row in rows], device=ids.device)
        positions = None
        if len(set(map(len, rows))) > 1:
            place = torch.arange(ids.shape[1], device=ids.device)[None]
            positions = torch.where(place < sizes[:, None], place, EMPTY)
        self.cache, self.decode = [], None  # before another cache is made: both hold the rows of this one
        cache = self.model.new_cache(len(rows), self.capacity) if use_cache else None
        model, last = evaluated(self.model), (torch.arange(len(rows), device=ids.device), sizes - 1)
        if is_whole(model):
            logits = model(ids, positions, cache)[last]
        else:  # the head reads the last tokens only
            logits = model.logits(model.hidden(ids, positions, cache)[last])
        if len(rows) < len(texts):
            sources = torch.tensor(which, device=ids.device)
            logits = logits[sources]
            for remembered in cache or ():
                remembered.select_batch(sources)
        self.cache = cache or []
        return logits


def _noise(n_row: int, n_step: int, seed: int | np.integer[Any] | Sequence[int] | None) -> Tensor:
    """Return a uniform number for every draw, (B, steps), each row from its own seed."""
    if seed is None:
        seed = [int(torch.randint(2**62, ())) % TORCH_SEEDS for _ in range(n_row)]
    seeds = list(seed) if isinstance(seed, Iterable) else [seed] * n_row
    for value in seeds:
        if not isinstance(value, Integral):
            raise UsageError(f"seed={value!r} is not a whole number. Give one, such as 0, or one per prompt.")
    if len(seeds) != n_row:
        raise UsageError(f"{len(seeds)} seeds for {n_row} prompts. Give one, or one per prompt.")
    rows = [_uniform(n_step, int(s) % 2**64) for s in seeds]
    return torch.stack(rows) if rows else torch.empty(0, n_step)


def _uniform(n_step: int, seed: int) -> Tensor:
    if seed < TORCH_SEEDS:
        return torch.rand(n_step, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.from_numpy(np.random.default_rng(seed).random(n_step))
