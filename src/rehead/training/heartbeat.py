"""Notices that another process of a run has ended or hangs, and ends this one."""

import logging
import os
import threading
import time
from contextlib import suppress

from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger("rehead")
BEAT, PATIENCE = 1.0, 20.0
"""Seconds between two signs of life, and how long a process may be silent."""


class Heartbeat:
    """Signals in `store` that this process is alive, and watches the next rank; the last watches the first.

    A collective waits for a process that was killed or stopped, for up to half an hour. The thread does not: once the
    watched rank is silent for `PATIENCE` seconds, it names the rank and ends this process, whatever it is waiting for.
    torchrun then ends the others. C++ that holds the GIL for that long also counts as silence.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store, self._rank, self._watched = store, rank, (rank + 1) % world
        self._ended = threading.Event()
        self._name = f"{os.uname().nodename}, process {os.getpid()}"
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self, word: str) -> None:
        """Stop watching; tell the others that this process has "ended" as it should, or "failed"."""
        self._ended.set()
        self._thread.join()
        with suppress(RuntimeError):
            self._store.set(self._key(self._rank), word)

    def _beat(self) -> None:
        seen, since, count = "", time.monotonic(), 0
        while not self._ended.wait(BEAT):
            count += 1
            try:
                self._store.set(self._key(self._rank), f"{count} {self._name}")
                there = self._store.check([self._key(self._watched)])
                sign = self._store.get(self._key(self._watched)).decode() if there else ""
            except RuntimeError as error:
                if not self._ended.is_set():
                    self._give_up(f"the processes cannot reach each other any more ({error!s:.100})")
                return
            if sign != seen:
                seen, since = sign, time.monotonic()
            if sign == "failed":
                self._give_up(f"rank {self._watched} has failed")
            if sign != "ended" and time.monotonic() - since > PATIENCE:
                who = f" ({sign.partition(' ')[2]})" if sign else ""
                self._give_up(f"rank {self._watched}{who} has been silent for {PATIENCE:.0f} seconds")

    def _give_up(self, why: str) -> None:
        log.warning(
            "rank %d stops: %s. Start the same command again with trainer.resume=True.", self._rank, why
        )
        os._exit(5)

    @staticmethod
    def _key(rank: int) -> str:
        return f"alive/{rank}"
