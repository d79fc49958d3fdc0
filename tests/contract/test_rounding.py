"""What holds of generated tokens in which dtype: repeated, batched, cached."""

import copy

import pytest
import torch

from rehead.config import ModelOptions
from rehead.generation import generate
from rehead.model import build

pytestmark = pytest.mark.heavy

V, NEW = 101, 14
MARGIN = 2**-5
"""Of the largest logit: 4 units of bfloat16's rounding, 2^-7."""
FLAGS = {
    "gqa": {"n_kv_head": 2},
    "mla": {"attention": "mla", "kv_lora_rank": 16},
    "window": {"n_kv_head": 1, "window": 5},
}
kinds = pytest.mark.parametrize("kind", FLAGS)


def fresh(kind, dtype):
    model = build(ModelOptions(n_layer=2, n_query_head=4, n_embd=64, **FLAGS[kind]).resolve(V, 64)).eval()
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.08)
    return model.to(dtype)


def ways(model, ids, **sampling):
    """The same texts: in one batch, one by one, and without a cache."""
    return {
        "batch": generate(model, ids, NEW, **sampling),
        "alone": torch.stack([generate(model, text, NEW, **sampling) for text in ids]),
        "no cache": generate(model, ids, NEW, use_cache=False, **sampling),
    }


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_float32_and_float64_neither_cache_nor_batch_changes_a_token(kind, dtype):
    model, ids = fresh(kind, dtype), torch.randint(V, (4, 12))
    for sampling in ({"temperature": 0}, {"seed": 3}):
        found = ways(model, ids, **sampling)
        assert all(torch.equal(found["batch"], other) for other in found.values())


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_call_gives_the_same_tokens_in_every_dtype(kind, dtype):
    model, ids = fresh(kind, dtype), torch.randint(V, (4, 12))
    for sampling in ({"temperature": 0}, {"seed": 3}):
        for cached in (True, False):
            first = generate(model, ids, NEW, use_cache=cached, **sampling)
            assert torch.equal(first, generate(model, ids, NEW, use_cache=cached, **sampling))


def require_ties(model, ways):
    """Where two ways part, their tokens' exact logits are closer than bfloat16 can tell; how many rows part."""
    exact, parted = copy.deepcopy(model).double(), 0
    for other in ways.values():
        for row in (ways["batch"] != other).any(1).nonzero().flatten().tolist():
            one, two = ways["batch"][row], other[row]
            at = int((one != two).nonzero()[0])
            with torch.no_grad():
                logits = exact(one[None, :at])[0, -1]
            assert (logits[one[at]] - logits[two[at]]).abs() <= MARGIN * logits.abs().max()
            parted += 1
    return parted


@kinds
def test_in_bfloat16_tokens_part_only_where_rounding_decides(kind):
    """Greedy: what is computed in another order is rounded otherwise."""
    model = fresh(kind, torch.bfloat16)
    found = ways(model, torch.randint(V, (12, 12)), temperature=0)
    require_ties(model, found)
    found["other tokens"] = found["batch"].clone()
    found["other tokens"][:, 12] = (found["batch"][:, 12] + 1) % V
    with pytest.raises(AssertionError):
        require_ties(model, found)
