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


def cross_entropy(head, hidden, targets):
    """The loss in parts by a linear layer."""
    trained = [weight for weight in head.parameters() if weight.requires_grad]
    return loss.cross_entropy(head, trained, hidden, targets, head.out_features)


@pytest.mark.parametrize("held", [1, N * 4, N * 33, N * 34])
def test_parts_are_the_whole(held, monkeypatch):
    """Also where the last part is smaller."""
    monkeypatch.setattr(logits, "LOGITS", held)
    head, hidden = nn.Linear(D, N), torch.randn(B, L, D, requires_grad=True)
    targets = torch.randint(N, (B, L))
    ours = cross_entropy(head, hidden, targets)
    theirs = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(ours, theirs)
    leaves = [hidden, *head.parameters()]
    grads = [torch.autograd.grad(one, leaves) for one in (ours, theirs)]
    for mine, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("learns", [True, False])
def test_each_part_is_computed_once(learns, monkeypatch):
    """The backward pass recomputes nothing; a frozen head gets no gradient, what is before it the same one."""
    monkeypatch.setattr(logits, "LOGITS", N * 4)
    head, hidden = nn.Linear(D, N).requires_grad_(learns), torch.randn(B, L, D, requires_grad=True)
    targets = torch.randint(N, (B, L))
    (wanted,) = torch.autograd.grad(F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten()), hidden)
    computed = []
    head.register_forward_hook(lambda *_: computed.append(1))
    (2 * cross_entropy(head, hidden, targets)).backward()
    assert len(computed) == -(-B * L // 4)
    torch.testing.assert_close(hidden.grad, 2 * wanted)
    assert (head.weight.grad is not None) == learns


def test_memory_is_that_of_a_part(monkeypatch):
    n_token, n_row = 5000, 400
    head, hidden = nn.Linear(8, n_token), torch.randn(1, n_row, 8, requires_grad=True)
    targets = torch.randint(n_token, (1, n_row))

    monkeypatch.setattr(logits, "LOGITS", n_token * 40)
    whole = peak_allocated(
        lambda: logits.cross_entropy(head, hidden[0], targets[0], reduction="mean").backward()
    )
    parts = peak_allocated(lambda: cross_entropy(head, hidden, targets).backward())
    assert parts < whole / 3


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("share", [None, 1.0, 0.3])
@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_a_step_takes_it_where_logits_are_many(monkeypatch, share, cap, dtype, within):
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
        options = TrainerOptions(distillation=1.0 if share is None else share, dtype=dtype)
        trainer = Trainer(copy.deepcopy(model), options, None if share is None else other)
        records.append(trainer.advance(lambda: batch))
    assert taken == [1]
    for name in ("loss", "grad_norm"):
        assert records[0][name] == pytest.approx(records[1][name], rel=within)


def bfloat16_step(*, recompute, n_layer=8):
    """Return a model of `n_layer` layers, 66 wide, and what computes its loss on few tokens."""
    sizes = ModelOptions(n_layer=n_layer, n_embd=66, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(0)
    model, ids = build(sizes.resolve(19, 8)).float(), torch.randint(19, (1, 3))
    step = objective.Objective(model, TrainerOptions(dtype="bfloat16", recompute=recompute))
    return model, lambda: step(ids, ids)


def test_recomputed_layers_leave_no_weights_in_bfloat16():
    model, loss_of = bfloat16_step(recompute=True)
    layer = 2 * sum(weight.numel() for weight in model.layers[0].parameters())
    assert peak_allocated(loss_of) < 2 * layer


def test_recomputed_layers_give_the_same_bits_in_bfloat16():
    model, loss_of = bfloat16_step(recompute=True)
    other, wanted = bfloat16_step(recompute=False)
    mine, theirs = loss_of(), wanted()
    assert torch.equal(mine, theirs)
    mine.backward()
    theirs.backward()
    for ours, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, its.grad)
