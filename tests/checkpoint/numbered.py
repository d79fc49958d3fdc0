"""Checkpoints that say which step they are of: each weight of the model is its number."""

import rehead
from rehead.checkpoint import publish
from rehead.model import both_seen


def filled(step):
    """A model whose every weight is this number."""
    model = both_seen()
    for weight in model.parameters():
        weight.data.fill_(step)
    return model


def save_step(run, step, n_more=3, n_repeat=100):
    """A checkpoint of this step, with some files more: the number again and again."""
    with publish(run / "checkpoints" / f"step-{step:06d}") as aside:
        more = {f"more-{i}.json": f"{step}" * n_repeat for i in range(n_more)}
        rehead.checkpoint.own.write(filled(step), aside, more)
