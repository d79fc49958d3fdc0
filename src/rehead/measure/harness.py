"""Runs tasks of lm-evaluation-harness on any model that rehead reads.

Texts become ids, windows and prompts as they do for the harness's own `HFLM`, so a stock export has the same results
there. The package lm-eval is imported when it is needed.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rehead.checkpoint.companions import GENERATION, json_table
from rehead.errors import InvalidInput
from rehead.measure.answers import Sampling, Writer
from rehead.measure.continuations import loglikelihoods
from rehead.tokenizer import OpenedModel

MOST = 256
"""Tokens of an answer where the task names no number, as in `HFLM`."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What a task may call that number; the first counts."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A model with its tokenizer, read in at most `length` tokens, `batch_size` texts at once (None for what fits)."""

    opened: OpenedModel
    length: int
    batch_size: int | None = None

    @cached_property
    def end(self) -> int | None:
        """The id that ends a text."""
        return self.opened.mark("eos")

    @cached_property
    def begin(self) -> int | None:
        """The id before an empty context and before a whole text: the one that begins a text, or else ends it."""
        begin = self.opened.mark("bos")
        return self.end if begin is None else begin

    def ids(self, text: str, add_special_tokens: bool | None) -> list[int]:
        """Return the ids of a text; None adds what the tokenizer adds, unless the text spells its first token."""
        tokenizer = self.opened.require_tokenizer()
        if add_special_tokens is None:
            spelled = None if self.begin is None else tokenizer.token(self.begin)
            add_special_tokens = not (spelled and text.startswith(spelled))
        found: list[int] = tokenizer.encode(
            text, special_tokens=True if add_special_tokens else "read"
        ).tolist()
        return found

    def scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, and whether it is greedy."""
        return loglikelihoods(self.opened.model, pairs, self.length, self.batch_size)

    def answers(self, prompts: Sequence[str], options: dict[str, Any]) -> list[str]:
        """Return what the model writes after each prompt, by the `generation_kwargs` of a task."""
        end, tokenizer = self.end, self.opened.require_tokenizer()
        penalty = json_table(self.opened.folder / GENERATION).get("repetition_penalty", 1)
        if penalty != 1:
            warnings.warn(
                f"{GENERATION} has repetition_penalty={penalty}, which lm_eval on a stock model applies to answers; "
                "rehead does not: they differ",
                stacklevel=2,
            )
        writer = Writer(
            model=self.opened.model,
            tokenizer=tokenizer,
            length=self.length,
            ends=frozenset(id for id in (*self.opened.ends, end) if id is not None),
            silent=tokenizer.special_ids,
        )
        how = sampling(options, "" if end is None else tokenizer.token(end))
        return writer.answers([self.ids(prompt, None) for prompt in prompts], how, self.batch_size)


def sampling(options: dict[str, Any], end: str) -> Sampling:
    """Return how tokens are chosen, by the `generation_kwargs` of a task. Raises InvalidInput for unknown ones."""
    rest = dict(options)
    until = rest.pop("until", None) or []
    stops = [until] if isinstance(until, str) else list(until)
    counts = [value for name in LENGTHS if (value := rest.pop(name, None)) is not None]
    temperature = float(rest.pop("temperature", 0.0) or 0.0)
    sample = rest.pop("do_sample", temperature > 0)
    top_k, top_p = rest.pop("top_k", None), rest.pop("top_p", None)
    if rest:
        raise InvalidInput(
            f"generation_kwargs {', '.join(sorted(rest))} of a task: rehead samples with temperature, top_k and top_p. "
            "Take the others out of the task, or run lm_eval on an export."
        )
    return Sampling(
        max_new_tokens=int(counts[0]) if counts else MOST,
        stops=tuple(filter(None, [*stops, end])),
        temperature=(temperature or 1.0) if sample else 0.0,
        top_k=top_k or None,
        top_p=top_p,
    )


def language_model(scored: Scored) -> Any:
    """Return the model as one of the harness, for `lm_eval.evaluate`."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Adapter(TemplateLM):  # type: ignore[misc]
        """What the harness asks of a model; it makes pairs of ids from contexts and continuations itself."""

        eot_token_id = property(lambda self: scored.end)
        prefix_token_id = property(lambda self: scored.begin)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return scored.ids(string, add_special_tokens)

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            if scored.begin is None and any(request.args[0] == "" for request in requests):
                raise InvalidInput(
                    "a task scores texts after an empty context, and this model has no token that begins or ends a "
                    "text: name one as bos_token_id in its config, or use another task."
                )
            found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
            return found

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            return scored.scores([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
            pairs: list[tuple[list[int], list[int]]] = []
            sizes = []
            for request in requests:
                ids = scored.ids(request.args[0], None)
                begin, rest = (ids[:1], ids[1:]) if scored.begin is None else ([scored.begin], ids)
                windows = get_rolling_token_windows(rest, *begin, scored.length, 1) if rest else []
                pairs += (some := [make_disjoint_window(window) for window in windows])
                sizes.append(len(some))
            logs = iter(log for log, _ in scored.scores(pairs))
            return [sum(next(logs) for _ in range(size)) for size in sizes]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            found = [""] * len(requests)
            groups: dict[str, list[int]] = {}
            for index, request in enumerate(requests):
                groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
            for indices in groups.values():
                prompts = [requests[index].args[0] for index in indices]
                texts = scored.answers(prompts, requests[indices[0]].args[1])
                for index, text in zip(indices, texts, strict=True):
                    found[index] = text
            return found

    return Adapter()
