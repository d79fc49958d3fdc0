"""Small models whose sizes all differ, with no weight at its first value."""

import pytest
import torch
import torch.nn.functional as F

from rehead.config import GPTConfig
from rehead.model import build

VOCAB, BLOCK, WIDTH, HIDDEN = 29, 16, 23, 31


@pytest.fixture(scope="session")
def gpt():
    """A GPT of one attention for all layers, or one per layer; trained a few steps if asked."""

    def make(*attention, n_layer=2, n_step=0, seed=1, std=0.3, **changed):
        torch.manual_seed(seed)
        layers = attention * n_layer if len(attention) == 1 else attention
        config = {
            "vocab_size": VOCAB,
            "block_size": BLOCK,
            "n_embd": WIDTH,
            "attention": layers,
            "learned_positions": layers[0].rope is None,
            "norm": "layernorm",
            "norm_eps": 1e-5,
            "mlp": "gelu",
            "n_hidden": HIDDEN,
            "mlp_bias": True,
        }
        model = build(GPTConfig(**config | changed)).eval()
        for parameter in model.parameters():
            parameter.data += std * torch.randn_like(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for _ in range(n_step):
            ids = torch.randint(model.config.vocab_size, (3, 9))
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return model

    return make


@pytest.fixture(scope="session")
def apart():
    """How far the logits of two models are from each other, relative to the largest of the first."""

    def distance(one, other, n_token=13, batch=5):
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(one.config.vocab_size, (batch, n_token), generator=generator)
        with torch.no_grad():
            here, there = one(ids).double(), other(ids).double()
        return ((here - there).abs().max() / here.abs().max()).item()

    return distance


@pytest.fixture(scope="session")
def words():
    """Token ids in which one tells a little of the next."""

    def make(n, seed=0, vocab=VOCAB):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randint(3, (n,), generator=generator)
        return ((torch.arange(n) * 7 + noise.cumsum(0)) % vocab).numpy()

    return make
