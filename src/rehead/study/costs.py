"""Measures the costs of each variant: sizes by formula and as held, memory of a training step, and time.

The variants take turns in every round, so that a slow phase of the machine affects all of them.
"""

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rehead.attention import LatentConfig
from rehead.config import GPTConfig
from rehead.conversion.folder import plannable_dtype
from rehead.data.files import write_whole
from rehead.measure import cache_bytes, decode_speed, forward_flops, kv_bytes_per_token, parameters
from rehead.measure.attention_cost import AttentionCost, attention_cost
from rehead.measure.environment import environment
from rehead.measure.memory_in_use import held_cache_bytes
from rehead.measure.size import training_flops
from rehead.measure.speed import input_lengths
from rehead.measure.training import step_memory
from rehead.model import LanguageModel, modes_kept
from rehead.stages import staged
from rehead.study.begun import read
from rehead.study.job import Job, firsts
from rehead.study.work import load
from rehead.system.device import choose_device
from rehead.training.frozen import freeze
from rehead.training.loop import Trainer
from rehead.training.start import read_teacher

Record = dict[str, Any]
FILE, FORMAT = "costs.json", 7
"""Costs of another format are measured again."""
ROUNDS = 3
SHOWN_LENGTHS = 8


def known_costs(jobs: Sequence[Job]) -> Record | None:
    """Return what `measure_costs` wrote; None if there is nothing, or a job has changed since."""
    known = read(jobs[0].place / FILE)
    if known is None or (known.get("format"), known.get("of")) != (FORMAT, _described(jobs)):
        return None
    return known


def measure_costs(jobs: Sequence[Job], *, serving: bool) -> Record:
    """Measure the first job of every variant; return and write `costs`, what they are `of`, and the `environment`."""
    known = {
        "format": FORMAT,
        "of": _described(jobs),
        "environment": environment(choose_device(jobs[0].options.trainer.device)),
        "costs": costs(firsts(jobs), serving=serving),
    }
    write_whole(jobs[0].place / FILE, [json.dumps(known).encode()])
    return known


def _described(jobs: Sequence[Job]) -> list[list[Any]]:
    return [[job.variant, job.description()] for job in firsts(jobs)]


def costs(jobs: Sequence[Job], *, serving: bool = False) -> dict[str, Record]:
    """Return the costs by variant. Times are [median, lowest, highest] of three rounds.

    A training step has the variant's own batch size and length, on random tokens; converted models are not
    trained. Decoding is greedy, one sequence, from one token to the end of the context. The cost of attention
    alone is that of `measure.attention_cost`. `serving` leaves out training and decoding without a cache; all models
    then have the dtype of the first one's source, since healing leaves weights in float32.
    """
    sized = staged(jobs, "measuring sizes", len(jobs), "variants")
    dtype = _dtype_of(jobs[0]) if serving else None
    by_variant = {job.variant: _Subject(job, dtype).sizes() for job in sized}
    times: dict[str, dict[str, list[float]]] = {job.variant: {} for job in jobs}
    turns = staged(list(jobs) * ROUNDS, "timing all variants in turns", len(jobs) * ROUNDS, "measurements")
    for job in turns:
        for key, value in _Subject(job, dtype).times().items():
            times[job.variant].setdefault(key, []).append(value)
    for name, measured in times.items():
        by_variant[name] |= {
            key: [median(several), min(several), max(several)] for key, several in measured.items()
        }
    return by_variant


def _dtype_of(job: Job) -> torch.dtype:
    """Return the dtype of the model that a job was made from."""
    while job.parent is not None:
        job = job.parent
    return plannable_dtype(job.model)


def _trainer(job: Job, model: LanguageModel) -> Trainer:
    """Return a trainer that takes the steps of a trained or healed job."""
    freeze(model, job.options.trainer)
    return Trainer(model, job.options.trainer, read_teacher(job.options, model, model.device))


class _Subject:
    """A model to measure, and its trainer; the changed weights are not saved. Only one is in memory at a time."""

    def __init__(self, job: Job, served_in: torch.dtype | None) -> None:
        self.job, self.model, self.serving = job, load(job), served_in is not None
        if served_in is not None:
            self.model = self.model.to(served_in)
        self.trainer = _trainer(job, self.model) if job.is_trained and not self.serving else None
        self.n_token = job.options.data.block_size

    def sizes(self) -> Record:
        """Return sizes by formula and as measured, in the model's dtype."""
        model, n_token = self.model, self.n_token
        config, dtype = model.config, model.head.weight.dtype
        memory, teacher = None, None
        if self.trainer is not None:
            teacher = self.trainer.teacher
            with modes_kept(model):
                model.train(self.trainer.teacher is None)
                memory = step_memory(
                    model,
                    self.trainer.objective,
                    self.trainer.optimizer,
                    self._ids(),
                    accumulates=self.job.options.trainer.grad_accumulation > 1,
                )
            memory |= {key: cost.kept_bytes for key, cost in self._attention().items()}
        return {
            "context": n_token,
            "parameters": parameters(config),
            "parameters_counted": sum(weight.numel() for weight in model.parameters()),
            "weight_bytes": sum(weight.nbytes for weight in model.parameters()),
            "kv_bytes_per_token": kv_bytes_per_token(config, dtype),
            "cache_bytes": cache_bytes(config, n_token, dtype=dtype),
            "cache_bytes_held": held_cache_bytes(model, n_token),
            "training_flops_per_token": training_flops(config, n_token, train=self.job.options.trainer.train)
            + (0 if teacher is None else forward_flops(teacher.config, n_token)),
            "rebuilds_keys": isinstance(config, GPTConfig)
            and any(isinstance(layer, LatentConfig) and layer.rebuilds_keys for layer in config.attention),
            "input_lengths": {
                way: input_lengths(model, min(SHOWN_LENGTHS, n_token - 1), use_cache=way == "cached")
                for way in self._ways()
            },
            "memory": memory,
        }

    def times(self) -> dict[str, float]:
        """Measure tokens per second and seconds per step once."""
        figures = {
            f"tokens_per_second_{way}": decode_speed(self.model, self.n_token - 1, use_cache=way == "cached")
            for way in self._ways()
        }
        if self.trainer is not None:
            ids = self._ids()
            for _ in range(2):  # the first step also allocates the optimizer's state
                step = self.trainer.advance(lambda: (ids[:, :-1], ids[:, 1:]))
            figures["seconds_per_step"] = step["seconds"]
            n_batch = self.job.options.trainer.grad_accumulation
            figures |= {
                f"seconds_of_{key}": n_batch * cost.seconds for key, cost in self._attention().items()
            }
        return figures

    def _attention(self) -> dict[str, AttentionCost]:
        """Measure attention in a training step, as it is computed and with all scores stored."""
        assert self.trainer is not None
        options, drops = self.job.options.trainer, self.trainer.teacher is None
        low = torch.bfloat16 if options.dtype == "bfloat16" else None
        inputs = self._ids()[:, :-1]
        ways = {"attention": False, "attention_scores_kept": True}
        costs = {
            key: attention_cost(
                self.model,
                inputs,
                scores_kept=stored,
                dtype=low,
                dropout=drops,
                recompute=options.recompute,
            )
            for key, stored in ways.items()
        }
        return {key: cost for key, cost in costs.items() if cost is not None}

    def _ways(self) -> tuple[str, ...]:
        """Return how decoding is measured."""
        return ("cached",) if self.serving else ("cached", "uncached")

    def _ids(self) -> Tensor:
        shape = self.job.options.trainer.batch_size, self.n_token + 1
        return torch.randint(self.model.config.vocab_size, shape)
