"""TensorBoard: event files in reports/tensorboard of the run's folder."""

from collections.abc import Mapping

from rehead.config.strict_yaml import dump
from rehead.training.reporting.base import Start, kind, reporters

SECONDS = 1
"""Between writes to disk: a killed run loses no more."""


CLOSED = "tensorboard.step"
"""The file, beside the events, that has the last step of a report that was closed; a killed run leaves none."""


@reporters.add("tensorboard")
class TensorBoard:
    """Writes scalars. A resumed run appends to a report that was closed; otherwise it writes its last step again.

    TensorBoard hides the earlier values of steps that are written again.
    """

    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._closed, self._step = start.folder / CLOSED, start.step
        is_whole = self._closed.is_file() and 0 < start.step <= int(self._closed.read_text())
        self._closed.unlink(missing_ok=True)
        self._kept = {one for one in start.logged if one[0] <= start.step} if is_whole else set()
        self._writer = SummaryWriter(
            str(start.folder / "tensorboard"), purge_step=start.step + is_whole, flush_secs=SECONDS
        )
        if not start.step:
            text = "".join(f"    {line}\n" for line in dump(start.config).splitlines())
            self._writer.add_text("config", text, 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric, in float32, unless the report has them."""
        self._step = step
        if kind(step, metrics) in self._kept:
            return
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, exit_code: int) -> None:
        """Write what is pending, and that the report is whole."""
        self._writer.close()
        self._closed.write_text(f"{self._step}\n", encoding="utf-8")
