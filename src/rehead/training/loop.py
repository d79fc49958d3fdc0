"""The training loop: one optimizer step at a time."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rehead.config import TrainerOptions
from rehead.data import Batch
from rehead.errors import NumericError
from rehead.measure import memory
from rehead.model import LanguageModel
from rehead.model.gpt import GPT
from rehead.system.allocator import keep_freed_memory
from rehead.training.loss import cross_entropy, distillation, fits
from rehead.training.optimizer import build_optimizer, learning_rate


class Trainer:
    """Trains a model: holds it, its optimizer, and the number of steps taken.

    With a `teacher` the model learns the teacher's predictions, without dropout, because it should become
    the same function.
    """

    def __init__(
        self, model: LanguageModel, options: TrainerOptions, teacher: LanguageModel | None = None
    ) -> None:
        self.model, self.options, self.teacher = model, options, teacher
        keep_freed_memory()
        self.optimizer = build_optimizer(model, options)
        self.step = 0
        self._forward: nn.Module = model
        if options.compile:
            self._forward = torch.compile(model)  # type: ignore[assignment]

    def advance(
        self, next_batch: Callable[[], Batch], abandonable: Callable[[], Any] = nullcontext
    ) -> dict[str, Any]:
        """Take one step over `grad_accumulation` batches; return its record for metrics.jsonl.

        `loss` is in nats per token, with dropout; `seconds` is the time of the whole step, including data.
        The gradient is computed within `abandonable()`; an exception there leaves weights and optimizer as they were.
        Raises NumericError, before the weights change, if the loss or the gradient is not finite.
        """
        options, start = self.options, time.perf_counter()
        rate = learning_rate(self.step, options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train(self.teacher is None)
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        with abandonable():
            for _ in range(options.grad_accumulation):
                part = self._loss(*next_batch()) / options.grad_accumulation
                part.backward()
                loss += float(part.detach())
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), options.grad_norm_clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NumericError(
                f"step {self.step + 1}: loss {loss}, gradient norm {norm}: not finite. The "
                "weights are unchanged; lower trainer.learning_rate."
            )
        self.optimizer.step()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
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

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        device = self.model.device
        low = self.options.dtype == "bfloat16"
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=low):
            if self._in_parts(inputs):
                return self._loss_in_parts(inputs.to(device), targets.to(device))
            logits = (
                self.model.logits(self._hidden(inputs.to(device)))
                if self.options.recompute
                else self._forward(inputs.to(device))
            )
            wanted = None if self.teacher is None else self._teach(inputs.to(device))
        rows = logits.flatten(0, 1).float()
        loss = F.cross_entropy(rows, targets.to(device).flatten())
        if wanted is None:
            return loss
        share = self.options.distillation
        divergence = F.kl_div(rows.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        return share * divergence + (1 - share) * loss

    def _in_parts(self, inputs: Tensor) -> bool:
        """Return True if there are too many logits to hold at once, and only the loss needs them."""
        plain = not self.options.compile and isinstance(self.model, GPT)
        return plain and not fits(inputs.numel(), self.model.config.vocab_size)

    def _loss_in_parts(self, inputs: Tensor, targets: Tensor) -> Tensor:
        head, hidden, n_token = self.model.logits, self._hidden(inputs), self.model.config.vocab_size
        if self.teacher is None:
            return cross_entropy(head, hidden, targets, n_token)
        with torch.no_grad():
            taught = self.teacher.hidden(inputs)
        share = self.options.distillation
        return distillation(head, hidden, targets, self.teacher.logits, taught, share, n_token)

    def _hidden(self, inputs: Tensor) -> Tensor:
        """Return the input of the head; with `recompute` only the inputs of layers are kept for the backward pass."""
        if not self.options.recompute:
            return self.model.hidden(inputs)
        assert isinstance(self.model, GPT)
        x = self.model.embed(inputs)
        for layer in self.model.layers:
            x = checkpoint(layer, x, None, None, use_reentrant=False)
        return self.model.finish(x)

    @torch.no_grad()
    def _teach(self, inputs: Tensor) -> Tensor:
        """Return the teacher's log-probabilities, (B L, vocab)."""
        assert self.teacher is not None
        return self.teacher(inputs).flatten(0, 1).float().log_softmax(-1)
