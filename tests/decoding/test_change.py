"""A decoder stays right when its model is changed after it was made, and refuses a step before a cache counts it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import rehead
from rehead import decoding
from rehead.attention import GroupedConfig, RopeConfig
from rehead.config import RNNConfig
from rehead.errors import UsageError
from rehead.model import build
from small import llama_shaped

V, D = 23, 24
GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=10, v_head_dim=7, rope=RopeConfig())
IDS = torch.tensor([1, 2])


def gpt(*attention):
    torch.manual_seed(0)
    return build(llama_shaped(*attention, vocab_size=V, n_embd=D, n_hidden=17)).eval().float()


def three_tokens(model, decode):
    with torch.no_grad():
        cache = model.new_cache(2)
        return torch.stack([decode(IDS, cache) for _ in range(3)])


def by_forward(model):
    return three_tokens(model, lambda ids, cache: model(ids[:, None], cache=cache)[:, 0])


def scaled(model):
    model.layers[1].mlp.register_forward_hook(lambda part, x, y: 3 * y)


def scaled_output(model):
    model.register_forward_pre_hook(lambda part, x: (x[0].flip(0),))


@torch.no_grad()
def doubled(model):
    for weight in model.parameters():
        weight.mul_(2)


CHANGES = {
    "in place": doubled,
    "double": lambda model: model.double(), "bfloat16": lambda model: model.bfloat16(),
    "there and back": lambda model: model.double().bfloat16(), "hook": scaled, "hook on the model": scaled_output,
    "other weights": lambda model: model.load_state_dict(
        {name: 2 * weight for name, weight in model.state_dict().items()}, assign=True
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_decoder_notices_that_its_model_was_changed(change):
    model = gpt(GQA, GQA)
    decode = decoding.decoder(model)
    before = three_tokens(model, decode)
    change(model)
    wanted = by_forward(model)
    assert not torch.equal(before, wanted.float())
    error = 0.02 if wanted.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(three_tokens(model, decode), wanted, rtol=error, atol=error)


@torch.no_grad()
def test_weights_that_only_pytorch_reads_are_watched_too():
    """As a GPU's are; here they are negated, which C++ does not read."""
    model = gpt(GQA, GQA)
    for part in model.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            setattr(part, name, torch.nn.Parameter(torch._neg_view(-weight)))
    decode = decoding.decoder(model)
    before = three_tokens(model, decode)
    doubled(model)
    wanted = by_forward(model)
    assert not torch.allclose(before, wanted)
    torch.testing.assert_close(three_tokens(model, decode), wanted, rtol=1e-6, atol=1e-6)


def test_a_decoder_notices_autocast_and_its_end():
    model = gpt(GQA, GQA)
    decode = decoding.decoder(model)
    before = three_tokens(model, decode)
    with torch.autocast("cpu"):
        assert torch.equal(three_tokens(model, decode), by_forward(model))
    assert torch.equal(three_tokens(model, decode), before)


@torch.no_grad()
def test_a_bound_program_keeps_the_memory_that_it_reads():
    """C++ would read freed memory otherwise, until `decoder` notices."""
    model = gpt(GQA, GQA)
    decodes, caches = (
        [decoding.native_decoder(model) for _ in range(2)],
        [model.new_cache(2) for _ in range(2)],
    )
    if decodes[0] is None:
        pytest.skip("no compiler")
    for decode, cache in zip(decodes, caches, strict=True):
        decode(IDS, cache)
    wanted = decodes[0](IDS, caches[0])
    model.double()
    for weight in model.parameters():
        torch.full_like(weight, torch.nan, dtype=torch.float32)  # takes freed memory
    assert torch.equal(decodes[1](IDS, caches[1]).float(), wanted)


@pytest.mark.parametrize("part", ["head", "layers.0.self_attn", "layers.1.mlp"])
def test_weights_of_several_dtypes_are_refused_by_name(part):
    for call in (
        lambda model: decoding.decoder(model)(IDS, model.new_cache(2)),
        lambda model: rehead.generate(model, IDS, 2),
    ):
        model = gpt(GQA, GQA)
        model.get_submodule(part).double()
        with torch.no_grad(), pytest.raises(UsageError, match=r"torch.float64 \(.*model.to\(torch.float"):
            call(model)


UNRECORDED = {
    "pytorch": (lambda: gpt(GQA).double(), 2),
    "many sequences": (lambda: gpt(GQA), 17),
    "no program": (
        lambda: build(RNNConfig(vocab_size=V, block_size=9, n_embd=D, n_layer=1, n_hidden=9, n_output=V)),
        2,
    ),
}


@pytest.mark.parametrize(("make", "batch"), UNRECORDED.values(), ids=UNRECORDED)
def test_a_decoder_records_no_gradients(make, batch):
    """The cache would keep a graph of all tokens."""
    model = make()
    cache, decode = model.new_cache(batch), decoding.decoder(model)
    assert not any(decode(torch.zeros(batch, dtype=torch.long), cache).requires_grad for _ in range(2))
    assert not any(
        kept.requires_grad for one in cache for kept in getattr(one, "stores", None) or [one.state]
    )


def ways(model):
    """The two engines, and `forward`."""
    native = decoding.native_decoder(model)
    forward = lambda ids, cache: model(ids[:, None], cache=cache)[:, 0]  # noqa: E731
    return [decoding.torch_decoder(model), *([] if native is None else [native]), forward]


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["int64", "int32", "int16"])
def test_ids_are_a_tensor_or_an_array(dtype):
    model, array = gpt(GQA), IDS.numpy().astype(dtype)
    assert torch.equal(model(array[None]), model(IDS[None]))
    for decode in ways(model):
        wanted = decode(IDS, model.new_cache(2))
        for ids in (array, torch.from_numpy(array)):
            assert torch.equal(decode(ids, model.new_cache(2)), wanted)


def out_of_step(model):
    first, second = model.new_cache(2), model.new_cache(2)
    model(torch.ones(2, 5, dtype=torch.long), cache=first)
    return [first[0], second[1]]


def other_batch(model):
    cache = model.new_cache(2)
    cache[1].select_batch(torch.tensor([0]))
    return cache


WRONG = {
    "dtype": (lambda model: [GQA.cache(2, dtype=torch.bfloat16) for _ in range(2)], "keeps torch.bfloat16"),
    "rows": (lambda model: [replace(GQA, n_kv_head=6).cache(2) for _ in range(2)], "keeps {'key': "),
    "too few": (lambda model: model.new_cache(2)[:1], "1 caches for 2 layers"),
    "none": (lambda model: [], "0 caches for 2 layers"),
    "too many": (lambda model: model.new_cache(2) * 2, "4 caches for 2 layers"),
    "one for two": (lambda model: model.new_cache(2)[:1] * 2, "layers 0 and 1 were given the same"),
    "out of step": (out_of_step, "layer 0's holds 5 tokens and layer 1's 0"),
    "batch": (other_batch, "sequences"),
}


@pytest.mark.parametrize(("caches", "words"), WRONG.values(), ids=WRONG)
def test_wrong_caches_are_refused_by_name(caches, words):
    model = gpt(GQA, GQA)
    for decode in ways(model):
        with torch.no_grad(), pytest.raises(UsageError, match=words):
            decode(IDS, caches(model))


@torch.no_grad()
def test_a_refused_step_changes_no_cache():
    model = gpt(replace(GQA, window=3), GQA)
    for decode in ways(model):
        cache = model.new_cache(2, 4)
        model(torch.ones(2, 3, dtype=torch.long), cache=cache)
        for wrong in (torch.tensor([1, V]), torch.tensor([1])):
            with pytest.raises(UsageError):
                decode(wrong, cache)
        decode(IDS, cache)
        with pytest.raises(UsageError, match="capacity=4"):
            decode(IDS, cache)
        assert [one.n_token for one in cache] == [4, 4]


@pytest.mark.parametrize("cache", [3, None, [torch.zeros(2)] * 2, "of"], ids=str)
def test_what_is_no_cache_is_refused_by_name(cache):
    model = gpt(GQA, GQA)
    with pytest.raises(UsageError, match=r"Use model.new_cache"):
        model.require_caches(cache, 2)


@torch.no_grad()
def test_a_layer_that_the_config_does_not_describe_is_refused_by_name():
    model = gpt(GQA, GQA)
    model.layers.append(gpt(GQA).layers[0])
    with pytest.raises(UsageError, match="3 layers and its config describes 2"):
        rehead.generate(model, IDS, 2)
    two = nn.ModuleList(model.layers[:2])
    for few in (two, two[:1]):
        model.layers = few
        got = rehead.generate(model, IDS, 5, 0)
        assert torch.equal(got, rehead.generate(model, IDS, 5, 0, use_cache=False))
