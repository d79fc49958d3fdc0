"""The training loop: one optimizer step at a time."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from rehead.config import TrainerOptions
from rehead.data import Batch
from rehead.errors import NumericError
from rehead.measure import memory
from rehead.model import LanguageModel
from rehead.system.allocator import keep_freed_memory
from rehead.system.device import synchronize
from rehead.training.objective import Objective
from rehead.training.optimizer import build_optimizer, learning_rate
from rehead.training.ranks import OneProcess


class Trainer:
    """Trains a model: holds it, its optimizer, and the number of steps taken.

    With a `teacher` the model learns the teacher's predictions, without dropout, because it should become
    the same function. `ranks` are the processes that train it together.
    """

    def __init__(
        self,
        model: LanguageModel,
        options: TrainerOptions,
        teacher: LanguageModel | None = None,
        ranks: OneProcess | None = None,
    ) -> None:
        self.model, self.options, self.teacher = model, options, teacher
        self.ranks = ranks or OneProcess()
        keep_freed_memory()
        self.objective = self.ranks.wrap(Objective(model, options, teacher))
        self.optimizer = build_optimizer(model, options)
        self.step = 0

    def advance(
        self, next_batch: Callable[[], Batch], abandonable: Callable[[], Any] = nullcontext
    ) -> dict[str, Any]:
        """Take one step over `grad_accumulation` batches; return its record for metrics.jsonl.

        `loss` is in nats per token, with dropout if there is no teacher; `seconds` is the whole step's, with data.
        The gradient is computed within `abandonable()`; an exception there leaves weights and optimizer as they were.
        Raises NumericError, before the weights change, if the loss or the gradient is not finite.
        """
        options, start = self.options, time.perf_counter()
        rate = learning_rate(self.step, options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train(self.teacher is None)
        self.optimizer.zero_grad(set_to_none=True)
        loss, parts = 0.0, list[float]()
        with abandonable():
            for left in reversed(range(options.grad_accumulation)):
                with self.ranks.accumulating(self.objective, left > 0):
                    part = self.objective(*self.ranks.rows(next_batch())) / options.grad_accumulation
                    part.backward()
                parts.append(float(part.detach()))
                loss += parts[-1]
        loss = self.ranks.mean(loss)
        total = nn.utils.get_total_norm(self._gradients().values())
        norm = self.ranks.number(total)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NumericError(
                f"step {self.step + 1}{_batch(parts)}: loss {loss}, gradient norm {norm}{self._weight()}: not finite. "
                "The weights are unchanged; lower trainer.learning_rate."
            )
        nn.utils.clip_grads_with_norm_(self.model.parameters(), options.grad_norm_clip, total)
        self.optimizer.step()
        synchronize(self.model.device)
        self.step += 1
        seconds = time.perf_counter() - start
        return {
            "step": self.step,
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": norm,
            "seconds": round(seconds, 6),
            **memory(self.model.device),
        }

    def _gradients(self) -> dict[str, Tensor]:
        return {
            name: weight.grad for name, weight in self.model.named_parameters() if weight.grad is not None
        }

    def _weight(self) -> str:
        """Name the first weight with a gradient that is not finite."""
        for name, gradient in self._gradients().items():
            if not math.isfinite(self.ranks.number(nn.utils.get_total_norm([gradient]))):
                return f", first in {name}"
        return ""


def _batch(losses: Sequence[float]) -> str:
    """Name the first of a step's batches whose loss is not finite."""
    bad = [number for number, loss in enumerate(losses, 1) if not math.isfinite(loss)]
    return f", batch {bad[0]} of {len(losses)}" if bad else ""
