"""Texts that a model writes after prompts, up to a stop string, as generative tasks read them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rehead.decoding import prepare
from rehead.errors import InvalidInput
from rehead.generation import stream
from rehead.measure.forecast import generation_bytes
from rehead.model import LanguageModel
from rehead.stages import staged
from rehead.system.device import free_memory
from rehead.system.memory import require_memory
from rehead.tokenizer import Tokenizer

TOGETHER = 16
"""Prompts continued at once by default."""
PARTIAL = 4
"""Tokens that a character may be spread over, at most."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; `temperature=0` takes the likeliest. A text ends before the first of `stops`."""

    max_new_tokens: int
    stops: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Continues prompts with a model that reads at most `length` tokens.

    Ids in `ends` end a text, those in `silent` have no text.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    length: int
    ends: frozenset[int]
    silent: frozenset[int]

    def answers(
        self, prompts: Sequence[Sequence[int]], how: Sampling, batch_size: int | None = None
    ) -> list[str]:
        """Return what the model writes after each prompt (ids).

        A prompt and its new tokens are at most `length`: a longer prompt loses its beginning. Raises InvalidInput where
        this leaves no token of it.
        """
        room = self.length - how.max_new_tokens
        if room < 1:
            raise InvalidInput(
                f"{how.max_new_tokens} new tokens leave no room for a prompt in {self.length}. Use a larger "
                "--length, or a smaller max_gen_toks in the generation_kwargs of the task."
            )
        prepare(self.model)
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        longest = min(max(map(len, prompts), default=1), room)
        given = None if batch_size is None else max(1, min(batch_size, len(prompts)))
        together = self._together(longest, how.max_new_tokens, given)
        found = [""] * len(prompts)
        batches = [order[first : first + together] for first in range(0, len(order), together)]
        for batch in staged(batches, "writing answers", len(prompts), "answers", len):
            texts = self._batch([prompts[index][-room:] for index in batch], how)
            for index, text in zip(batch, texts, strict=True):
                found[index] = text
        return found

    def _together(self, longest: int, new: int, given: int | None) -> int:
        """Return how many prompts are continued at once: `given`, or what half of the free memory holds, 16 at most."""
        device, dtype, least = self.model.device, self.model.head.weight.dtype, given or 1
        parts = generation_bytes(self.model.config, least, longest, new, dtype, ragged=True)
        many, smaller = ("an answer", "") if least == 1 else (f"{least} answers", "--batch-size or ")
        require_memory(f"{many} after {longest:,} tokens", parts, f"Use a smaller {smaller}--length.", device)
        if given is not None:
            return given
        return max(1, min(TOGETHER, free_memory(device) // 2 // sum(parts.values())))

    def _batch(self, prompts: Sequence[Sequence[int]], how: Sampling) -> list[str]:
        """Continue several prompts until each has ended."""
        rows: list[list[int]] = [[] for _ in prompts]
        going = set(range(len(prompts)))
        ends = self.ends | {self.tokenizer.id_of(stop) for stop in how.stops} & self.silent
        recent = max((len(stop.encode()) for stop in how.stops), default=0) + PARTIAL
        for tokens in stream(
            self.model,
            [torch.tensor(prompt) for prompt in prompts],
            how.max_new_tokens,
            how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
        ):
            new = tokens.tolist()
            for row in list(going):
                token = new[row]
                if token in ends:
                    going.remove(row)
                    continue
                rows[row].append(token)
                end = self._text(rows[row][-recent:]) if how.stops else ""
                if any(stop in end for stop in how.stops):
                    going.remove(row)
            if not going:
                break
        return [_before(self._text(row), how.stops) for row in rows]

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode([id for id in ids if id not in self.silent])


def _before(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
