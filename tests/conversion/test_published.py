"""Published conversions that ours is compared with: exact where their algebra says so."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rehead.attention import GroupedConfig, RopeConfig
from rehead.attention.rope_scaling import LinearScaling
from rehead.conversion.blocks import blocks_of
from rehead.conversion.fit.layerwise import gather

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FULL = 23
"""The width of the models of conftest.py: no latent needs more."""


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import published

    yield published
    sys.modules.pop("published")


@pytest.fixture(params=["half-split", "interleaved"])
def rope(request):
    return RopeConfig(theta=100.0, layout=request.param)


@pytest.fixture
def seen(tmp_path):
    """Statistics of a model on a text."""

    def read(model):
        ids = torch.randint(
            model.config.vocab_size, (400,), generator=torch.Generator().manual_seed(1)
        ).numpy()
        return gather(model, blocks_of(model, ids, 400, 16), tmp_path, needs=["inputs"], seed=0)

    return read


def heads(rope, n_kv_head=3):
    return GroupedConfig(n_query_head=6, n_kv_head=n_kv_head, head_dim=8, rope=rope)


def test_mha2mla_loses_the_rotations_it_drops_and_the_rank(published, gpt, apart, seen, rope):
    model = gpt(heads(rope))
    found = seen(model)
    whole = published.mha2mla(model, found, 8, FULL)
    assert whole.config.attention[0].kv_numbers() == 3 * 8 + FULL
    assert apart(model, whole) < 1e-12
    assert apart(model, published.mha2mla(model, found, 4, FULL)) > 0.01
    assert apart(model, published.mha2mla(model, found, 8, 5)) > 0.01


def test_mha2mla_keeps_the_largest_pairs_of_each_head(published, gpt, apart, seen, rope):
    """All pairs but one per KV head have no keys: only those are needed, and they differ by head and layer."""
    model = gpt(heads(rope))
    for layer, shift in zip(model.layers, (0, 1), strict=True):
        rows = layer.self_attn.k_proj.weight.data.view(3, 8, -1)
        for head in range(3):
            pair = (head + shift) % 4
            own = [pair, pair + 4] if rope.layout == "half-split" else [2 * pair, 2 * pair + 1]
            rows[head, [row for row in range(8) if row not in own]] = 0
    result = published.mha2mla(model, seen(model), 2, FULL)
    assert apart(model, result) < 1e-12


def test_transmla_of_one_head_is_exact(published, gpt, apart, seen, rope):
    model = gpt(heads(rope, n_kv_head=1))
    assert apart(model, published.transmla(model, seen(model), 8, 16, 1)) < 1e-12


@pytest.mark.parametrize(("rope_dim", "fold"), [(8, 1), (8, 2), (4, 2), (4, 4), (2, 4)])
def test_transmla_is_exact_where_nothing_turns(published, gpt, apart, seen, rope, rope_dim, fold):
    """And where rope turns, it is not, nor in a narrow latent."""
    still = gpt(heads(replace(rope, scaling=LinearScaling(factor=1e12))))
    found = seen(still)
    assert apart(still, published.transmla(still, found, rope_dim, FULL, fold)) < 1e-8
    assert apart(still, published.transmla(still, found, rope_dim, 6, fold)) > 0.01
    model = gpt(heads(rope))
    assert apart(model, published.transmla(model, found, rope_dim, FULL, fold)) > 0.01


def test_transmla_finds_what_all_heads_share(published, gpt, apart, seen, rope):
    """Keys that are multiples of the first head's need one component of every frequency."""
    model = gpt(heads(rope))
    for layer in model.layers:
        rows = layer.self_attn.k_proj.weight.data.view(3, 8, -1)
        rows[1], rows[2] = 2 * rows[0], -0.5 * rows[0]
    found = seen(model)
    assert apart(model, published.transmla(model, found, 8, FULL, 1)) < 1e-12
    with pytest.raises(ValueError, match="fold=1: a multiple of 2 that divides 4"):
        published.transmla(model, found, 4, FULL, 1)


def test_transmla_balances_keys_with_values(published, gpt, apart, seen, rope):
    """Larger keys and smaller queries are the same model, and the same result."""
    model, other = gpt(heads(rope)), gpt(heads(rope))
    for layer in other.layers:
        layer.self_attn.k_proj.weight.data *= 1024
        layer.self_attn.q_proj.weight.data /= 1024
    results = [published.transmla(each, seen(each), 8, 12, 1) for each in (model, other)]
    assert apart(*results) < 1e-6
