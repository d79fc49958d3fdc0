"""The processes that train one model together: here one process, in distributed.py several."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rehead.config import RunOptions
from rehead.data import Batch, Tokens
from rehead.errors import ConfigError
from rehead.measure import evaluate
from rehead.model import LanguageModel
from rehead.system.device import choose_device
from rehead.system.torchrun import of_torchrun
from rehead.tokenizer import Tokenizer
from rehead.training import state
from rehead.training.folder import RunFolder
from rehead.training.interrupt import Stop
from rehead.training.objective import Objective
from rehead.training.start import read_text

Result = TypeVar("Result")


class OneProcess:
    """One process, which does everything itself: what several share out, and what the first of them does alone."""

    rank, world = 0, 1
    sharded = False
    """Whether each process keeps only a share of the weights."""

    def stop(self) -> Stop:
        """Return what receives the signals of this process."""
        return Stop()

    def device(self, name: str) -> torch.device:
        """Return the device that trainer.device names, on which this process trains; a GPU becomes the current one."""
        chosen = choose_device(name)
        if chosen.type == "cuda" and chosen.index is not None:
            torch.cuda.set_device(chosen)
        return chosen

    def folder(self, path: Path) -> RunFolder:
        """Return the run's folder; only the first process writes to it."""
        return RunFolder(path)

    def text(
        self, options: RunOptions, folder: RunFolder, checkpoint: Path | None
    ) -> tuple[Tokenizer, Tokens]:
        """Return the tokenizer and the tokens of the text."""
        return read_text(options, folder.read_tokens, checkpoint)

    def wrap(self, objective: Objective) -> nn.Module:
        """Return the module whose backward pass gives the gradient of all processes' rows."""
        return objective

    def rows(self, batch: Batch) -> Batch:
        """Return the rows of a batch that this process computes."""
        return batch

    def accumulating(self, objective: nn.Module, more: bool) -> AbstractContextManager[None]:
        """Return a context for a forward and a backward pass; gradients are exchanged if no `more` follow."""
        return nullcontext()

    def mean(self, number: float) -> float:
        """Return the mean of a number over the processes."""
        return number

    def finite(self, model: LanguageModel) -> bool:
        """Return whether all weights are finite."""
        return all(bool(weight.isfinite().all()) for weight in model.parameters())

    def number(self, value: Tensor) -> float:
        """Return a scalar, which may be sharded."""
        return float(value)

    def deferred(self, value: Tensor) -> Tensor:
        """Return a tensor, which may be sharded, as one that the first process reads whole within `reading`."""
        return value

    def reading(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, in which only the first process reads what `deferred` and `gathered` return."""
        return work()

    def like(self, weight: Tensor, value: Tensor) -> Tensor:
        """Return a whole tensor as `weight` is: on its device, and sharded if it is."""
        return value.to(weight.device)

    def apart(self, objective: nn.Module, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, which uses the model without gradients; all processes do the same."""
        return work()

    def evaluate(self, objective: nn.Module, model: LanguageModel, blocks: Iterable[Batch]) -> float:
        """Return the mean loss over the blocks, in nats per token."""
        return evaluate(model, blocks)[0]

    def gathered(self, model: LanguageModel) -> LanguageModel | None:
        """Return the model in the first process, which reads its weights within `reading`; None in the others."""
        return model

    def random_states(self) -> dict[str, Tensor]:
        """Return the random states of all processes."""
        return state.random_states()

    def restore_random(self, states: dict[str, Tensor]) -> None:
        """Restore this process's random states. Raises KeyError if they are missing."""
        state.restore_random(states)

    def begin_dropout(self, seed: int) -> None:
        """Let the processes draw different dropout masks."""


@contextmanager
def ranks_of(options: RunOptions) -> Iterator[OneProcess]:
    """Yield the processes that train, as trainer.parallel says and torchrun started them.

    Raises ConfigError if the two do not agree.
    """
    parallel, job = options.trainer.parallel, of_torchrun()
    if parallel == "none":
        if job is not None and job.world != 1:
            raise ConfigError(
                f"{job.world} processes were started to train one run: give trainer.parallel=fsdp or ddp."
            )
        yield OneProcess()
        return
    if job is None:
        raise ConfigError(
            f"trainer.parallel={parallel} needs processes. Start it with torchrun --nproc-per-node 2 -m rehead, or "
            "give trainer.parallel=none."
        )
    from rehead.training.distributed import group

    with group(options, job) as ranks:
        yield ranks
