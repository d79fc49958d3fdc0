"""A whole training run: set up, train, evaluate, sample, save, and stop cleanly."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rehead.checkpoint import own
from rehead.config import RunOptions, flags
from rehead.conversion.certificate import CERTIFICATE
from rehead.data import BatchSampler, Split, Tokens, describe, evaluation_blocks, split
from rehead.errors import ConfigError, Interrupted, NumericError
from rehead.generation import stream
from rehead.measure import parameters
from rehead.tokenizer import Tokenizer
from rehead.training import state
from rehead.training.folder import RunFolder
from rehead.training.frozen import freeze
from rehead.training.heal import require_same_tokens
from rehead.training.healed import certificate_of, healed_files
from rehead.training.interrupt import Abandoned, Stop, stop_signals
from rehead.training.loop import Trainer
from rehead.training.ranks import OneProcess, ranks_of
from rehead.training.reporting import Reports, Start, require_packages
from rehead.training.reporting.base import kind
from rehead.training.rounding import arithmetic, warn_of_rounding
from rehead.training.saving import Saver, Snapshot
from rehead.training.start import (
    carried_files,
    located,
    read_teacher,
    require_same_run,
    require_step,
    start_model,
    teacher_sha256,
)

PROMPT_TOKENS = 8
"""Samples continue this many tokens of the validation text, unless a prompt is given."""


def train(options: RunOptions) -> Iterator[dict[str, Any]]:
    """Train a model; yield the records of metrics.jsonl as they are written.

    The first describes the run (`event` start), the last sums it up (`event` end). On SIGINT, SIGTERM
    or SIGHUP the run abandons the step, evaluation or sample it is in, saves and raises Interrupted. With
    `trainer.resume` it resumes from the newest good checkpoint; on a CPU, with the same threads and
    versions, the result is bit-identical to an uninterrupted run. With `trainer.parallel` every process of torchrun
    calls this, and all yield the same records; the first writes them.
    """
    require_packages(options.trainer.report_to or ())
    with ranks_of(options) as ranks:
        folder = ranks.folder(Path(options.system.work_dir))
        with folder.open(resume=options.trainer.resume) as checkpoint:
            run = Run(options, ranks, folder, checkpoint)
            # Signals are not handled before: until here there is nothing to save.
            with stop_signals(ranks.stop()) as stop, run.saver, run.reports:
                yield from run.records(stop)


class Run:
    """A run in progress: its text, model, optimizer and folder."""

    def __init__(
        self, options: RunOptions, ranks: OneProcess, folder: RunFolder, checkpoint: Path | None
    ) -> None:
        self.options, self.ranks, self.folder = options, ranks, folder
        self.saver = Saver(folder, options.trainer.keep, ranks)
        device = ranks.device(options.trainer.device)
        numbers = None if checkpoint is None else state.read_numbers(checkpoint)
        before = [] if numbers is None else folder.recorded(numbers["step"])
        data, seed = options.data, options.system.seed
        self.tokenizer: Tokenizer
        self.tokens: Tokens
        self.tokenizer, self.tokens = ranks.text(options, folder, checkpoint)
        if options.trainer.teacher is not None:
            require_same_tokens(self.tokenizer, options.trainer.teacher)
        self.split: Split = split(self.tokens.ids, data.block_size, data.val_fraction)
        self.teacher = teacher_sha256(options)
        if checkpoint is not None:
            require_same_run(checkpoint, folder.config, options, self.tokens.sha256, self.teacher)
        self.certificate = certificate_of(options)
        if checkpoint is None:
            model = start_model(options, self.tokenizer.vocab_size, device, in_memory=not ranks.sharded)
        else:
            model = own.load(checkpoint, in_memory=not ranks.sharded)
        self.carried = carried_files(options.model, checkpoint)
        self.bos = self.tokenizer.bos
        self.prompt = self._prompt(model.config.context_limit)
        self.sampler = BatchSampler(
            self.split.train, data.block_size, options.trainer.batch_size, seed, bos=self.bos
        )
        self.best: float | None = None
        self.owed = numbers is not None and numbers.get("owed", False)
        """Whether the last step is not followed yet by what is due after it: a signal came before its end."""
        self.saved = None if numbers is None else numbers["step"]
        if checkpoint and self.certificate and self.saved == options.trainer.max_iters:
            self.owed |= not (checkpoint / CERTIFICATE).is_file()
        if self.owed:
            before = [one for one in before if one["step"] < self.saved or "loss" in one]
        if not ranks.sharded:  # else layer by layer, as they are sharded
            model = model.to(device)
        freeze(model, options.trainer)
        teacher = read_teacher(options, model, device)
        require_step(options, model, device, ranks.world, sharded=ranks.sharded)
        self.trainer = Trainer(model, options.trainer, teacher, ranks)
        ranks.begin_dropout(seed)
        if checkpoint is not None and numbers is not None:
            self.trainer.step = numbers["step"]
            self.best = numbers["best_val_loss"]
            warn_of_rounding(numbers, arithmetic(ranks.world))
            optimizer = self.trainer.optimizer
            draws = state.restore(checkpoint, self.trainer.model, optimizer, ranks.restore_random, ranks.like)
            self.sampler.restore(draws)
        names = options.trainer.report_to if options.trainer.report_to and ranks.rank == 0 else []
        known = [record for record in folder.recorded() if "event" not in record] if names else []
        start = Start(
            folder=folder.path.absolute() / "reports",
            name=folder.path.absolute().name,
            config=asdict(located(options)),
            step=self.trainer.step,
            logged=frozenset(kind(record["step"], record) for record in known),
        )
        folder.begin(flags.write(located(options)), before)
        self.reports = Reports(names, start, [record for record in before if record["step"] == start.step])

    def records(self, stop: Stop) -> Iterator[dict[str, Any]]:
        """Train to the end, or save and raise Interrupted once `stop` has a signal."""
        try:
            yield from self._records(stop)
        except NumericError as error:
            yield from self.saver.finish()
            raise NumericError(f"{error} {self.folder.way_back()}") from error

    def _records(self, stop: Stop) -> Iterator[dict[str, Any]]:
        trainer = self.trainer
        yield self._log(self._start_record())
        try:
            yield from self._steps(stop)
        except Abandoned:
            if self.saved != trainer.step:
                yield from self.saver.save(self._snapshot(owed=self.owed))
            yield from self.saver.finish()
            assert stop.signal is not None
            raise Interrupted(
                f"stopped at step {trainer.step} and saved in {self.folder.path}: continue with "
                f"system.work_dir={self.folder.path} trainer.resume=True.",
                stop.signal,
            ) from None

    def _steps(self, stop: Stop) -> Iterator[dict[str, Any]]:
        """Train and evaluate to the end; raise Abandoned, between two steps, once `stop` has a signal."""
        options, trainer, last = self.options.trainer, self.trainer, None
        if trainer.step == 0:
            yield (last := self._log(self._evaluation(stop)))
            if options.max_iters == 0:
                yield from self.saver.save(self._snapshot(self._certificate(stop)))
        while self.owed or trainer.step < options.max_iters:
            if not self.owed:
                yield self._log(self._advance(stop))
                yield from self.saver.finished()
            done = trainer.step == options.max_iters
            if done or trainer.step % options.eval_every == 0:
                yield (last := self._log(self._evaluation(stop)))
            if options.sample_every and (done or trainer.step % options.sample_every == 0):
                with stop.abandonable():
                    sample = self._sample()
                yield sample
            if done or trainer.step % options.save_every == 0:
                if done and self.certificate is not None and self.saved != trainer.step:
                    *before, _ = self.saver.save(self._snapshot(owed=True))  # measuring may take hours
                    yield from before
                certificate = self._certificate(stop) if done else {}
                save = self.saver.begin if options.save_async and not done else self.saver.save
                yield from save(self._snapshot(certificate))
            self.owed = False
            if not done:
                stop.check()
        if last is None:  # a finished run, resumed
            yield (last := self._log(self._evaluation(stop)))
        yield self._log({"event": "end", **last, "best_val_loss": self.best})

    def _advance(self, stop: Stop) -> dict[str, Any]:
        """Take one step, or none and restore the random states if a signal comes before the weights change."""
        draws, random = self.sampler.state(), state.random_states()
        try:
            record = self.trainer.advance(self.sampler.next, stop.abandonable)
        except Abandoned:
            self.sampler.restore(draws)
            state.restore_random(random)
            raise
        self.owed = True
        return record

    def _start_record(self) -> dict[str, Any]:
        config = self.trainer.model.config
        return {
            "event": "start",
            "step": self.trainer.step,
            "work_dir": str(self.folder.path),
            "text": describe(self.options.data),
            "parameters": parameters(config),
            "vocab_size": config.vocab_size,
            "train_tokens": len(self.split.train),
            "val_tokens": len(self.split.val),
            "text_sha256": self.tokens.sha256,
            **({} if self.bos is None else {"bos": self.tokenizer.token(self.bos)}),
            "device": str(self.trainer.model.device),
            **arithmetic(self.ranks.world),
        }

    def _evaluation(self, stop: Stop) -> dict[str, Any]:
        """Return the losses without dropout, on the same blocks of both splits each time."""
        record: dict[str, Any] = {"step": self.trainer.step}
        size, n_batch = self.options.trainer.batch_size, self.options.trainer.eval_batches
        for name, ids in (("train_loss", self.split.train), ("val_loss", self.split.val)):
            if len(ids) < 2:
                continue
            blocks = evaluation_blocks(ids, self.options.data.block_size, size, size * n_batch, bos=self.bos)
            with stop.abandonable():
                record[name] = self.ranks.evaluate(self.trainer.objective, self.trainer.model, blocks)
        if "val_loss" in record:
            self.best = min(record["val_loss"], record["val_loss"] if self.best is None else self.best)
        return record

    def _prompt(self, limit: int | None) -> list[int]:
        """Return the prompt of samples. Raises InvalidInput for characters outside the vocabulary."""
        given = self.options.trainer.sample_prompt
        begin = [] if self.bos is None else [self.bos]
        if given is not None:
            prompt = [*begin, *map(int, self.tokenizer.encode(given))]
            if limit is not None and len(prompt) > limit:
                raise ConfigError(
                    f"trainer.sample_prompt has {len(prompt)} tokens, the model reads {limit}: give a shorter prompt."
                )
            return prompt
        ids = self.split.val if len(self.split.val) else self.split.train
        return [*begin, *map(int, ids[:PROMPT_TOKENS])][:limit]

    def _sample(self) -> dict[str, Any]:
        """Generate after the prompt; write and return the text."""
        options = self.options.trainer

        def generated() -> list[int]:
            new = stream(
                self.trainer.model,
                [torch.tensor(self.prompt)],
                options.sample_tokens,
                options.sample_temperature,
                top_k=options.sample_top_k,
                seed=self.options.system.seed,
            )
            return [int(token) for token in new]

        prompt = self.prompt if self.bos is None else self.prompt[1:]
        text = self.tokenizer.decode([*prompt, *self.ranks.apart(self.trainer.objective, generated)])
        self.folder.write_sample(self.trainer.step, text)
        return {"event": "sample", "step": self.trainer.step, "text": text}

    def _snapshot(self, certificate: dict[str, str] | None = None, *, owed: bool = False) -> Snapshot:
        """Return what a checkpoint of this moment holds. Raises NumericError if the weights are not finite."""
        trainer = self.trainer
        if not self.ranks.finite(trainer.model):
            raise NumericError(
                f"step {trainer.step}: weights are not finite and were not saved; "
                "lower trainer.learning_rate."
            )
        model, optimizer = self.ranks.gathered(trainer.model), trainer.optimizer
        random, draws = self.ranks.random_states(), self.sampler.state()
        tensors = state.tensors_of(trainer.model, optimizer, draws, random, self.ranks.deferred)
        numbers = {
            "step": trainer.step,
            "best_val_loss": self.best,
            "text_sha256": self.tokens.sha256,
            **arithmetic(self.ranks.world),
            **({} if self.teacher is None else {"teacher_sha256": self.teacher}),
            **({"owed": True} if owed else {}),
        }
        self.saved = trainer.step
        texts = {"tokenizer.json": self.tokenizer.to_json(), **self.carried, **(certificate or {})}
        return Snapshot(model=model, tensors=tensors, numbers=numbers, texts=texts)

    def _certificate(self, stop: Stop) -> dict[str, str]:
        """Return the certificate files of a healed model; none for other runs."""
        trainer = self.trainer
        if self.certificate is None or trainer.teacher is None or len(self.split.val) < 2:
            return {}
        given = self.certificate, self.options, trainer.model, trainer.teacher, trainer.step, self.split.val
        with stop.abandonable():
            files: dict[str, str] = self.ranks.apart(
                trainer.objective, lambda: healed_files(*given, self.tokenizer)
            )
        return files

    def _log(self, record: dict[str, Any]) -> dict[str, Any]:
        self.folder.log(record)
        self.reports.log(record)
        return record
