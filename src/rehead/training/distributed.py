"""Several processes that train one model, with PyTorch's DDP or FSDP2; imported only where trainer.parallel asks."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from rehead.checkpoint import own
from rehead.checkpoint.files.deferred import in_memory
from rehead.config import RunOptions
from rehead.data import IGNORE, Batch, Tokens, read_ids
from rehead.errors import ConfigError, Interrupted
from rehead.measure.quality import mean_loss, sums
from rehead.model import LanguageModel, skeleton
from rehead.system.device import choose_device
from rehead.system.torchrun import Torchrun
from rehead.tokenizer import Tokenizer
from rehead.training.folder import RunFolder
from rehead.training.gathering import Gathering
from rehead.training.heartbeat import PATIENCE, Heartbeat
from rehead.training.interrupt import Abandoned, Stop
from rehead.training.objective import Objective
from rehead.training.ranks import OneProcess, Result
from rehead.training.shared_folder import SharedFolder
from rehead.training.start import read_text

LONGEST = timedelta(minutes=30)
"""How long a process may wait for the others: one of them may write a checkpoint alone."""

WAIT = 0.1
"""Seconds between two looks for what the first process tells."""
LONGEST_PART = 2**20
"""Characters of one value of the store, which has room for 8 MiB; a tokenizer of 151,000 tokens has more."""


class Group(OneProcess):
    """The processes that torchrun started: ranks 0 to `world` - 1. Each computes its rows of every batch."""

    def __init__(self, options: RunOptions, job: Torchrun, store: Store) -> None:
        self.rank, self.world, self.job = job.rank, job.world, job
        self._store = store
        self._told = 0
        self.sharded = options.trainer.parallel == "fsdp"
        self._device = torch.device("cpu")
        self._gathering = Gathering(self.rank, self._device)
        size = options.trainer.batch_size
        if size % job.world:
            raise ConfigError(
                f"trainer.batch_size={size} cannot be shared by {job.world} processes: use a multiple of {job.world}."
            )

    def stop(self) -> Stop:
        """Return a stop that all processes agree on, between two steps."""
        return AgreedStop(self)

    def device(self, name: str) -> torch.device:
        """Return this process's device: a GPU of its own, by its number on the machine."""
        chosen = choose_device(name)
        if chosen.type == "cuda":
            if chosen.index is not None:
                raise ConfigError(f"trainer.device={name} names one GPU for all processes: use cuda.")
            chosen = choose_device(f"cuda:{self.job.local_rank}")
            torch.cuda.set_device(chosen)
        self._device, self._gathering = chosen, Gathering(self.rank, chosen)
        return chosen

    def folder(self, path: Path) -> RunFolder:
        """Return the run's folder, which the other processes only read."""
        return SharedFolder(path, self.tell, first=self.rank == 0, again=self.job.restarts > 0)

    def tell(self, text: str | None) -> str:
        """Return the first process's text in all of them."""
        self._told += 1
        key = f"told/{self._told}"
        if self.rank == 0:
            assert text is not None
            parts = [text[at : at + LONGEST_PART] for at in range(0, len(text), LONGEST_PART)]
            for index, part in enumerate(parts):
                self._store.set(f"{key}/{index}", part)
            self._store.set(key, str(len(parts)))
            return text
        while not self._store.check([key]):  # it may tokenize for hours; the heartbeat notices if it is lost
            time.sleep(WAIT)
        n_part = int(self._store.get(key))
        return "".join(self._store.get(f"{key}/{index}").decode() for index in range(n_part))

    def text(
        self, options: RunOptions, folder: RunFolder, checkpoint: Path | None
    ) -> tuple[Tokenizer, Tokens]:
        """Return the tokenizer and the tokens of the text, which the first process writes down."""
        if self.rank == 0:
            tokenizer, tokens = read_text(options, folder.read_tokens, checkpoint)
            about = {name: value for name, value in vars(tokens).items() if name != "ids"}
            self.tell(json.dumps({"tokenizer": tokenizer.to_json(), **about}))
        else:
            about = json.loads(self.tell(None))
            tokenizer = Tokenizer.from_json(about.pop("tokenizer"))
            tokens = Tokens(ids=read_ids(folder.read_tokens, tokenizer), **about)
        dist.barrier()  # the file gets its final name next
        return tokenizer, tokens

    def wrap(self, objective: Objective) -> nn.Module:
        """Shard the model and its teacher layer by layer, as they are read, or copy the model to all processes."""
        if not self.sharded:
            return DistributedDataParallel(objective)
        mesh = init_device_mesh(self._device.type, (self.world,))
        for model in filter(None, (objective.model, objective.teacher)):
            for layer in _layers(model):
                in_memory(layer)
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # moves it to the device
            in_memory(model)
            model.tie()
            model.to(self._device)
        fully_shard(objective, mesh=mesh)
        register_fsdp_forward_method(objective, "apart")
        return objective

    def rows(self, batch: Batch) -> Batch:
        """Return this process's rows of a batch; if there are too few, one whose targets are ignored."""
        inputs, targets = (part[self.rank :: self.world] for part in batch)
        if not len(inputs):
            return batch[0][:1], torch.full_like(batch[1][:1], IGNORE)
        return inputs, targets

    def accumulating(self, objective: nn.Module, more: bool) -> AbstractContextManager[None]:
        """Exchange gradients only after the last of several backward passes."""
        if isinstance(objective, DistributedDataParallel):
            return objective.no_sync() if more else nullcontext()
        assert isinstance(objective, FSDPModule)
        objective.set_requires_gradient_sync(not more)
        return nullcontext()

    def mean(self, number: float) -> float:
        """Return the mean of a number over the processes."""
        return self._summed(number)[0] / self.world

    def finite(self, model: LanguageModel) -> bool:
        """Return whether all weights are finite in every process, each of which looks at what it holds."""
        held = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in model.parameters())
        return self._summed(float(not all(bool(one.isfinite().all()) for one in held)))[0] == 0

    def number(self, value: Tensor) -> float:
        """Return a scalar, which may be sharded; all processes must ask at once."""
        return float(value.full_tensor() if isinstance(value, DTensor) else value)

    def deferred(self, value: Tensor) -> Tensor:
        """Return a tensor, which may be sharded, as one that the first process reads whole within `reading`."""
        return self._gathering.deferred(value)

    def reading(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, during which the other processes take part in what the first one reads."""
        return self._gathering.reading(work)

    def like(self, weight: Tensor, value: Tensor) -> Tensor:
        """Return a whole tensor as `weight` is: on its device, and sharded if it is."""
        if not isinstance(weight, DTensor):
            return value.to(weight.device)
        return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)

    def apart(self, objective: nn.Module, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, during which the weights outside the layers are held whole."""
        if not isinstance(objective, FSDPModule):
            return work()
        assert isinstance(objective, Objective)
        result = objective.apart(work)
        objective.reshard()
        return result

    def evaluate(self, objective: nn.Module, model: LanguageModel, blocks: Iterable[Batch]) -> float:
        """Return the mean loss over the blocks, of which each process reads its share."""
        mine = map(self.rows, blocks)
        total, count = self._summed(*self.apart(objective, lambda: sums(model, mine)))
        return mean_loss(total, round(count))[0]

    def gathered(self, model: LanguageModel) -> LanguageModel | None:
        """Return the model in the first process, with deferred weights where they are sharded; None in the others."""
        weights = {name: self.deferred(weight.detach()) for name, weight in model.named_parameters()}
        if self.rank:
            return None
        plain = skeleton(model.config)
        own.assign(plain, weights, "the model", in_memory=False)
        return plain

    def random_states(self) -> dict[str, Tensor]:
        """Return the random states of all processes: those of rank 2 end with .2."""
        states: dict[str, Tensor] = {}
        for name, ours in super().random_states().items():
            everyone = [torch.empty_like(ours, device=self._device) for _ in range(self.world)]
            dist.all_gather(everyone, ours.to(self._device))
            states |= {_of(name, rank): one.cpu() for rank, one in enumerate(everyone)}
        return states

    def restore_random(self, states: dict[str, Tensor]) -> None:
        """Restore this process's random states; a process that the run did not have before keeps its new ones."""
        mine = {
            name: states[_of(name, self.rank)]
            for name in ("rng.torch", "rng.cuda")
            if _of(name, self.rank) in states
        }
        if mine:
            super().restore_random(mine)

    def begin_dropout(self, seed: int) -> None:
        """Let the processes draw different dropout masks; the first draws as one process would."""
        if self.rank:
            torch.manual_seed((seed + self.rank) % 2**32)

    def largest(self, number: int) -> int:
        """Return the largest of the processes' numbers."""
        held = torch.tensor(number, device=self._device)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return int(held)

    def _summed(self, *numbers: float) -> list[float]:
        held = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(held)
        return [float(number) for number in held]


class AgreedStop(Stop):
    """Signals that end a run between two steps, in all processes after the same one."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def check(self) -> None:
        """Raise Abandoned if a signal has come to any process."""
        largest = self._group.largest(self.signal or 0)
        if largest:
            self.signal = largest
            raise Abandoned

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Keep running on a signal: the other processes wait for what the block computes."""
        yield


@contextmanager
def group(options: RunOptions, job: Torchrun) -> Iterator[Group]:
    """Yield this process's part in the group that torchrun started; leave it at the end.

    If another process is lost, this one names it and ends, as in `Heartbeat`.
    """
    store, _, _ = next(rendezvous("env://", timeout=LONGEST))
    beats = TCPStore(job.address, job.port, is_master=False, timeout=timedelta(seconds=PATIENCE))

    def part(of: Store, name: str) -> Store:
        return PrefixStore(f"rehead/{job.restarts}/{name}", of)

    ranks = Group(options, job, part(store, "told"))
    dist.init_process_group(
        "nccl" if choose_device(options.trainer.device).type == "cuda" else "gloo",
        store=part(store, "group"),
        rank=job.rank,
        world_size=job.world,
        timeout=LONGEST,
    )
    heart = Heartbeat(part(beats, "heart"), job.rank, job.world)
    try:
        yield ranks
        dist.barrier()  # no process leaves while another still communicates
    except BaseException as error:
        if isinstance(error, RuntimeError):
            time.sleep(PATIENCE + 5)  # the heartbeat names a rank that is lost, and ends this process
        if not isinstance(error, Interrupted):  # else all leave together
            heart.stop("failed")
            raise
        heart.stop("ended")
        raise
    heart.stop("ended")
    dist.destroy_process_group()


def _layers(model: LanguageModel) -> list[nn.Module]:
    lists = [part for part in model.children() if isinstance(part, nn.ModuleList)]
    return [layer for layers in lists for layer in layers]


def _of(name: str, rank: int) -> str:
    return f"{name}.{rank}" if rank else name
