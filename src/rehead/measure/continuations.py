"""Log-likelihoods of continuations of texts, as tasks of multiple choice compare them."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rehead.errors import InvalidInput, NumericError
from rehead.measure.forecast import batch_of
from rehead.measure.logits import in_parts
from rehead.model import LanguageModel, evaluating
from rehead.stages import staged
from rehead.system.device import free_memory
from rehead.system.memory import require_memory

Pair = tuple[Sequence[int], Sequence[int]]
"""Ids of a context and of what follows it, at least one of each."""
Group = tuple[tuple[int, ...], list[int]]
"""What the model reads for several continuations, and their numbers."""


@torch.no_grad()
def loglikelihoods(
    model: LanguageModel, pairs: Sequence[Pair], length: int, batch_size: int | None = None
) -> list[tuple[float, bool]]:
    """Return for each continuation its log-likelihood in nats after its context, and whether greedy decoding writes it.

    The model reads the last `length` tokens before the last one, as lm-evaluation-harness does: a longer context loses
    its beginning. Pairs that differ in the last token only are read once. Raises InvalidInput for a continuation that
    is empty or longer than `length`, NumericError for a logit that is not finite, and ResourceError for a batch that
    does not fit the memory.
    """
    model.require_generates()
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(pairs):
        if not len(context) or not 1 <= len(continuation) <= length:
            raise InvalidInput(
                f"a continuation of {len(continuation)} tokens after a context of {len(context)}: a model that reads "
                f"{length} tokens scores 1 to {length}, after at least one. Use a larger --length, or another task."
            )
        groups.setdefault((*context, *continuation)[-length - 1 : -1], []).append(index)
    found: dict[int, tuple[float, bool]] = {}
    batches = _batches(model, sorted(groups.items(), key=lambda group: -len(group[0])), length, batch_size)
    with evaluating(model):
        for batch in staged(
            batches,
            "scoring",
            len(pairs),
            "continuations",
            lambda batch: sum(len(group[1]) for group in batch),
        ):
            found |= _scored(model, batch, pairs)
    return [found[index] for index in range(len(pairs))]


def _batches(
    model: LanguageModel, groups: Sequence[Group], length: int, batch_size: int | None
) -> Iterator[Sequence[Group]]:
    """Yield the groups, the longest first, as many at once as suit the memory."""
    dtype, device, first = model.head.weight.dtype, model.device, 0
    while first < len(groups):
        longest = len(groups[first][0])
        many, parts = batch_of(model.config, longest, dtype, free_memory(device), batch_size)
        if first == 0:
            way_out = "Use a smaller --batch-size or --length."
            require_memory(f"reading {many} x {longest:,} tokens at once", parts, way_out, device)
        yield groups[first : first + many]
        first += many


def _scored(
    model: LanguageModel, batch: Sequence[Group], pairs: Sequence[Pair]
) -> dict[int, tuple[float, bool]]:
    """Return the results of a batch by the numbers of its pairs; inputs are padded on the right."""
    texts = [torch.tensor(ids) for ids, _ in batch]
    hidden = model.hidden(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(model.device))
    numbers, rows, wanted = [], [], []
    for row, (ids, indices) in enumerate(batch):
        for index in indices:
            continuation = pairs[index][1]
            numbers.append(index)
            rows.append(hidden[row, len(ids) - len(continuation) : len(ids)])
            wanted.append(torch.tensor(continuation, device=hidden.device))
    logs, greedy = _logs(model, torch.cat(rows), torch.cat(wanted))
    if not logs.isfinite().all():
        raise NumericError(
            "a log-likelihood is not finite: the model's weights are damaged, or it has diverged."
        )
    sizes = [len(pairs[index][1]) for index in numbers]
    return {
        index: (float(some.sum()), bool(same.all()))
        for index, some, same in zip(numbers, logs.split(sizes), greedy.split(sizes), strict=True)
    }


def _logs(model: LanguageModel, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each wanted token, in float64, and whether it is the likeliest."""
    logs, greedy = [], []
    for some, their in in_parts(model.head.out_features, hidden, wanted):
        logits = model.logits(some)
        exact = torch.promote_types(logits.dtype, torch.float32)
        logs.append(-F.cross_entropy(logits.to(exact), their, reduction="none").double().cpu())
        greedy.append((logits.argmax(-1) == their).cpu())
    return torch.cat(logs), torch.cat(greedy)
