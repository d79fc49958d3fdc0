"""What else a machine did while something was timed."""

import os
import resource
import time
from pathlib import Path


class Load:
    """What this process, with those it had start, and all others have used since it was made."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._wall, self._own, (self._all, self._stolen) = (
            time.perf_counter(),
            self._process(),
            self._machine(),
        )
        self._switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    def _process(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime + sum(map(_processor_seconds, self._pids))

    @staticmethod
    def _machine() -> tuple[float, float]:
        """Processor seconds used by anyone, and those another virtual machine took."""
        stat = Path("/proc/stat")
        if not stat.exists():
            return 0.0, 0.0
        user, nice, system, _, _, irq, soft, steal, *_ = map(int, stat.read_text().split("\n")[0].split()[1:])
        tick = os.sysconf("SC_CLK_TCK")
        return (user + nice + system + irq + soft) / tick, steal / tick

    def disturbed(self, wall: float, threads: int) -> bool:
        """True where the scheduler took this process off its core, or others needed what it could have used."""
        own, everyone = self._process() - self._own, self._machine()[0] - self._all
        free = (os.cpu_count() or 1) - threads
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - self._switches
        return switches > 20 or own < 0.9 * wall or everyone - own > (free + 0.1) * wall + 0.02

    def since(self) -> dict[str, float]:
        """Cores that other processes kept busy, cores stolen, load average, forced context switches."""
        wall = time.perf_counter() - self._wall
        everyone, stolen = self._machine()
        own = self._process() - self._own
        return {
            "others_cores": max(0.0, everyone - self._all - own) / wall,
            "stolen_cores": (stolen - self._stolen) / wall,
            "load_average": os.getloadavg()[0],
            "switches": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - self._switches,
        }


def _processor_seconds(pid: int) -> float:
    """Processor seconds that another process has used, 0 where that is not to be had."""
    stat = Path(f"/proc/{pid}/stat")
    if not stat.exists():
        return 0.0
    user, system = stat.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
