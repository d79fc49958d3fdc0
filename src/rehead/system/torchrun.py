"""What torchrun tells the processes it starts, in the environment."""

import os
from dataclasses import dataclass

NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """This process among those of a job: its `rank` of `world`, and its number `local_rank` on this machine.

    They meet at `address` and `port`. `restarts` counts how often torchrun has started them again after a loss.
    """

    rank: int
    local_rank: int
    world: int
    address: str
    port: int
    restarts: int


def of_torchrun() -> Torchrun | None:
    """Return this process's place in a job of torchrun, None if torchrun did not start it."""
    given = os.environ
    if "MASTER_ADDR" not in given or not all(given.get(name, "").isdecimal() for name in NUMBERS):
        return None  # a scheduler or a container may have set some of them
    local, restarts = (
        int(text) if (text := given.get(name, "")).isdecimal() else 0
        for name in ("LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    )
    return Torchrun(
        rank=int(given["RANK"]),
        local_rank=local,
        world=int(given["WORLD_SIZE"]),
        address=given["MASTER_ADDR"],
        port=int(given["MASTER_PORT"]),
        restarts=restarts,
    )
