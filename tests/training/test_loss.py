"""Cross entropy in parts: the same loss and gradients, without all logits at once."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rehead.config import ModelOptions, TrainerOptions
from rehead.measure import logits
from rehead.measure.memory_in_use import peak_allocated
from rehead.model import build
from rehead.training import loss, objective
from rehead.training.loop import Trainer

B, L, D, N = 3, 11, 5, 17


@pytest.mark.parametrize("held", [1, N * 4, N * 33, N * 34])
def test_parts_are_the_whole(held, monkeypatch):
    """Also where the last part is smaller."""
    monkeypatch.setattr(logits, "LOGITS", held)
    head, hidden = nn.Linear(D, N), torch.randn(B, L, D, requires_grad=True)
    targets = torch.randint(N, (B, L))
    ours = loss.cross_entropy(head, hidden, targets, N)
    theirs = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(ours, theirs)
    leaves = [hidden, *head.parameters()]
    grads = [torch.autograd.grad(one, leaves) for one in (ours, theirs)]
    for mine, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(mine, wanted)


def test_memory_is_that_of_a_part(monkeypatch):
    n_token, n_row = 5000, 400
    head, hidden = nn.Linear(8, n_token), torch.randn(1, n_row, 8, requires_grad=True)
    targets = torch.randint(n_token, (1, n_row))

    def run():
        loss.cross_entropy(head, hidden, targets, n_token).backward()

    whole = peak_allocated(run)
    monkeypatch.setattr(logits, "LOGITS", n_token * 40)
    assert peak_allocated(run) < whole / 3


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("share", [None, 1.0, 0.3])
def test_a_step_takes_it_where_logits_are_many(monkeypatch, share, cap):
    """With a teacher, too: of another width, and in any share; and with capped logits, as Gemma 2 has."""
    model, other = (
        build(
            replace(
                ModelOptions(n_layer=1, n_embd=n, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0).resolve(
                    19, 8
                ),
                logit_softcap=cap,
            )
        )
        for n in (12, 18)
    )
    for weight in (*model.parameters(), *other.parameters()):
        weight.data.add_(torch.randn_like(weight), alpha=0.5)
    batch = torch.randint(19, (4, 8)), torch.randint(19, (4, 8))
    records, taken = [], []
    name = "cross_entropy" if share is None else "distillation"
    real = getattr(objective, name)
    monkeypatch.setattr(objective, name, lambda *a: taken.append(1) or real(*a))
    for held in (10**6, 100):
        monkeypatch.setattr(logits, "LOGITS", held)
        options = TrainerOptions(distillation=1.0 if share is None else share)
        trainer = Trainer(copy.deepcopy(model), options, None if share is None else other)
        records.append(trainer.advance(lambda: batch))
    assert taken == [1]
    for name in ("loss", "grad_norm"):
        assert records[0][name] == pytest.approx(records[1][name], rel=1e-5)
