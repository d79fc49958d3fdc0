"""TensorBoard: event files in reports/tensorboard of the run's folder."""

from collections.abc import Mapping

from rehead.config.strict_yaml import dump
from rehead.training.reporting.base import Start, reporters

SECONDS = 1
"""Between writes to disk: a killed run loses no more."""


@reporters.add("tensorboard")
class TensorBoard:
    """Writes scalars. Steps from that of a resumed run on are written again, and those before it hidden."""

    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(start.folder / "tensorboard"), purge_step=start.step, flush_secs=SECONDS
        )
        if not start.step:
            text = "".join(f"    {line}\n" for line in dump(start.config).splitlines())
            self._writer.add_text("config", text, 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric, in float32."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is pending."""
        self._writer.close()
