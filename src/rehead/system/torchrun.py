"""What torchrun tells the processes it starts, in the environment."""

import os
from dataclasses import dataclass


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
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(given):
        return None
    return Torchrun(
        rank=int(given["RANK"]),
        local_rank=int(given.get("LOCAL_RANK", "0")),
        world=int(given["WORLD_SIZE"]),
        address=given["MASTER_ADDR"],
        port=int(given["MASTER_PORT"]),
        restarts=int(given.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )
