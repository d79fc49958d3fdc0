"""What a step minimises, as one module, so that several processes can wrap it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rehead.config import TrainerOptions
from rehead.measure import logits
from rehead.model import LanguageModel
from rehead.model.gpt import GPT
from rehead.training.loss import cross_entropy, distillation


class Objective(nn.Module):
    """The loss of `model` on a batch: on the text, on the predictions of a `teacher`, or both."""

    teacher: LanguageModel | None
    _compiled: Callable[[Tensor], Tensor]

    def __init__(
        self, model: LanguageModel, options: TrainerOptions, teacher: LanguageModel | None = None
    ) -> None:
        super().__init__()
        self.model, self.options = model, options
        compiled = torch.compile(model) if options.compile else model
        # Not parts of the module: they are not trained, or are the model.
        vars(self).update(teacher=teacher, _compiled=compiled)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, (B, L), in nats per token."""
        device = self.model.device
        low = self.options.dtype == "bfloat16"
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=low):
            if self._in_parts(inputs):
                return self._loss_in_parts(inputs.to(device), targets.to(device))
            predicted = (
                self.model.logits(self._hidden(inputs.to(device)))
                if self.options.recompute
                else self._compiled(inputs.to(device))
            )
            wanted = None if self.teacher is None else self._teach(inputs.to(device))
        rows = predicted.flatten(0, 1).float()
        loss = F.cross_entropy(rows, targets.to(device).flatten())
        if wanted is None:
            return loss
        share = self.options.distillation
        divergence = F.kl_div(rows.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        return share * divergence + (1 - share) * loss

    def _in_parts(self, inputs: Tensor) -> bool:
        """Return True if there are too many logits to hold at once, and only the loss needs them."""
        plain = not self.options.compile and isinstance(self.model, GPT)
        return plain and inputs.numel() * self.model.config.vocab_size > logits.LOGITS

    def _loss_in_parts(self, inputs: Tensor, targets: Tensor) -> Tensor:
        head, hidden, n_token = self.model.logits, self._hidden(inputs), self.model.config.vocab_size
        weights = [weight for weight in self.model.head.parameters() if weight.requires_grad]
        if self.teacher is None:
            return cross_entropy(head, weights, hidden, targets, n_token)
        with torch.no_grad():
            taught = self.teacher.hidden(inputs)
        share = self.options.distillation
        return distillation(head, weights, hidden, targets, self.teacher.logits, taught, share, n_token)

    def _hidden(self, inputs: Tensor) -> Tensor:
        """Return the input of the head; with `recompute` only the inputs of layers are kept for the backward pass.

        Nor does it keep the bfloat16 weights, which autocast would cache until the end of the forward pass.
        """
        if not self.options.recompute:
            return self.model.hidden(inputs)
        assert isinstance(self.model, GPT)
        x = self.model.embed(inputs)
        low, kind = self.options.dtype == "bfloat16", inputs.device.type
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=low, cache_enabled=False):
            for layer in self.model.layers:
                x = checkpoint(layer, x, None, None, use_reentrant=False)
        return self.model.finish(x)

    @torch.no_grad()
    def _teach(self, inputs: Tensor) -> Tensor:
        """Return the teacher's log-probabilities, (B L, vocab)."""
        assert self.teacher is not None
        return self.teacher(inputs).flatten(0, 1).float().log_softmax(-1)

    @torch.no_grad()
    def apart(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, which uses the model without gradients."""
        return work()
