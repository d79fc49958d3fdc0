"""Weights & Biases: its server, or with WANDB_MODE=offline files in reports/wandb of the run's folder."""

from collections.abc import Mapping

from rehead.errors import ResourceError
from rehead.training.reporting.base import Start, kind, reporters

PROJECT = "rehead"
"""Unless WANDB_PROJECT names another."""


@reporters.add("wandb")
class WeightsAndBiases:
    """Logs to a run of Weights & Biases; a resumed run keeps its id, without what it logged before."""

    def __init__(self, start: Start) -> None:
        import wandb

        settings = wandb.setup().settings
        if settings.mode == "online" and not wandb.login(prompt=False):  # init would ask, and wait
            raise ResourceError("there is no account: `wandb login`, or set WANDB_MODE=offline")
        id, self._logged = start.identity("wandb.id")
        self._run = wandb.init(
            project=settings.project or PROJECT,
            id=id,
            name=start.name,
            config=start.config,
            resume="allow",
            dir=str(start.folder),
            save_code=False,
            settings=wandb.Settings(console="off"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, once."""
        if kind(step, metrics) not in self._logged:
            self._run.log(dict(metrics), step=step)

    def close(self, exit_code: int) -> None:
        """Send what is pending; wandb marks the run as failed unless `exit_code` is 0."""
        self._run.finish(exit_code=exit_code)
