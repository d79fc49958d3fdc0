"""What a training step holds, and that each way of decoding is what it is called."""

import pytest
import torch

from rehead.config import ModelOptions
from rehead.measure.speed import input_lengths
from rehead.measure.training import step_memory
from rehead.model import build

DROPOUT = {"embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1}
DROPLESS = dict.fromkeys(DROPOUT, 0.0)


def model_of(**flags):
    return build(ModelOptions(n_layer=2, n_embd=24, n_query_head=4, **DROPLESS | flags).resolve(29, 16))


def held(batch_size=5, **flags):
    model = model_of(**flags)
    return model, step_memory(
        model, torch.optim.AdamW(model.parameters()), torch.randint(29, (batch_size, 17))
    )


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
