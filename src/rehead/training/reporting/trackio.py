"""trackio: a local database, or the Space that its environment variables name."""

from collections.abc import Mapping

from rehead.training.reporting.base import Start, kind, reporters

PROJECT = "rehead"


@reporters.add("trackio")
class Trackio:
    """Logs to the project `rehead`; a resumed run keeps its name, without what it logged before."""

    def __init__(self, start: Start) -> None:
        import trackio

        id, self._logged = start.identity("trackio.id")
        self._trackio = trackio
        trackio.init(
            project=PROJECT, name=f"{start.name}-{id}", config=start.config, resume="allow", embed=False
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, once."""
        if kind(step, metrics) not in self._logged:
            self._trackio.log(dict(metrics), step=step)

    def close(self, exit_code: int) -> None:
        """Write what is pending."""
        self._trackio.finish()
