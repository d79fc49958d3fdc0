"""What a training step holds, and that each way of decoding is what it is called."""

import pytest
import torch

from rehead.config import ModelOptions, TrainerOptions
from rehead.measure.speed import input_lengths
from rehead.measure.training import step_memory
from rehead.model import build
from rehead.training.frozen import freeze
from rehead.training.objective import Objective
from rehead.training.optimizer import build_optimizer

DROPOUT = {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
DROPLESS = dict.fromkeys(DROPOUT, 0.0)


def model_of(**flags):
    return build(ModelOptions(n_layer=2, n_embd=24, n_query_head=4, **DROPLESS | flags).resolve(29, 16))


PLAIN = TrainerOptions()


def held(batch_size=5, options=PLAIN, teacher=None, **flags):
    model = model_of(**flags)
    objective, optimizer = Objective(model, options, teacher), torch.optim.AdamW(model.parameters())
    return model, step_memory(model, objective, optimizer, torch.randint(29, (batch_size, 17)))


@pytest.mark.parametrize("dropout", [DROPLESS, DROPOUT])
def test_parts_are_what_they_are_called(dropout):
    model, sizes = held(**dropout)
    weights = 8 * sum(weight.numel() for weight in model.parameters())
    assert sizes["weights"] == weights
    assert 2 * weights <= sizes["optimizer"] <= 2 * weights + 16 * len(list(model.parameters()))
    assert 0 < sizes["gradients"] <= weights
    rest = sizes["peak"] - sizes["weights"] - sizes["optimizer"] - sizes["gradients"]
    assert 0.7 * sizes["activations"] < rest < 2.5 * sizes["activations"]
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if tensor.requires_grad is False or not isinstance(tensor, torch.nn.Parameter):
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(torch.zeros(5, 16, dtype=torch.long)).sum()
    assert loss.requires_grad
    assert 0.8 * sum(kept.values()) < sizes["activations"] < 1.6 * sum(kept.values())


def test_activations_grow_with_the_batch_and_weights_do_not():
    (_, few), (_, many) = held(batch_size=3), held(batch_size=6)
    assert 1.9 < many["activations"] / few["activations"] < 2.1
    assert (few["weights"], few["optimizer"]) == (many["weights"], many["optimizer"])


def test_what_the_options_of_a_training_save_is_counted(monkeypatch):
    """Recomputed layers keep their inputs, bfloat16 half the bytes of most, a loss in parts gradients for logits."""
    torch.set_default_dtype(torch.float32)
    usual, low = (held(20, TrainerOptions(dtype=dtype))[1] for dtype in ("float32", "bfloat16"))
    again = held(20, TrainerOptions(recompute=True))[1]
    monkeypatch.setattr("rehead.measure.logits.LOGITS", 29 * 16)
    parts = held(20)[1]
    assert again["activations"] < 0.4 * usual["activations"]
    assert again["peak"] < 0.8 * usual["peak"]
    assert 0.5 * usual["activations"] < low["activations"] < 0.95 * usual["activations"]
    gradient = 4 * 24 * 29  # of the head's weights, which is there already
    assert usual["activations"] - (parts["activations"] - gradient) >= 4 * 29 * 16 * 20
    assert {sizes["weights"] for sizes in (usual, low, again, parts)} == {usual["weights"]}


def test_the_weights_of_a_teacher_are_in_memory_too():
    teacher = model_of(n_kv_head=1).eval().requires_grad_(False)
    _, alone = held()
    _, taught = held(teacher=teacher)
    assert taught["weights"] - alone["weights"] == 8 * sum(weight.numel() for weight in teacher.parameters())


def test_frozen_weights_have_no_gradients_and_no_moments():
    model = model_of()
    freeze(model, TrainerOptions(train="attention"))
    optimizer = build_optimizer(model, TrainerOptions())
    sizes = step_memory(model, Objective(model, TrainerOptions()), optimizer, torch.randint(29, (5, 17)))
    n_trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert sizes["gradients"] <= 8 * n_trained < sizes["weights"] / 2
    assert 16 * n_trained <= sizes["optimizer"] <= 17 * n_trained


def test_fewer_kv_heads_hardly_move_the_activations():
    """E21: they do not depend on how heads share keys and values, beyond those themselves."""
    sizes = {n_kv_head: held(n_kv_head=n_kv_head)[1] for n_kv_head in (4, 1)}
    assert sizes[1]["weights"] < sizes[4]["weights"]
    assert 0.85 < sizes[1]["activations"] / sizes[4]["activations"] <= 1


def test_each_way_of_decoding_is_proven():
    """E24: what the model is fed per token."""
    for model in (model_of(rope=True), build(ModelOptions(type="rnn", n_embd=12).resolve(29, 16))):
        assert input_lengths(model, 5, use_cache=True) == [1, 1, 1, 1, 1]
        assert input_lengths(model, 5, use_cache=False) == [1, 2, 3, 4, 5]


def test_gradients_of_earlier_batches_are_held_in_a_step_that_accumulates():
    """While the forward pass of the second batch has its activations, too."""
    model = model_of()
    objective, optimizer = Objective(model, PLAIN, None), torch.optim.AdamW(model.parameters())
    ids = torch.randint(29, (5, 17))
    once = step_memory(model, objective, optimizer, ids)
    more = step_memory(model, objective, optimizer, ids, accumulates=True)
    weights = 8 * sum(weight.numel() for weight in model.parameters())
    assert more["gradients"] == weights
    assert more["activations"] == once["activations"]
    assert 0.5 * weights < more["peak"] - once["peak"] <= weights
