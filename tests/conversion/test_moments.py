"""What a text shows of each layer: the right sums, and nothing else kept in memory."""

import gc
import tempfile
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.conversion.base import Statistics
from rehead.conversion.fit.layerwise import gather
from rehead.conversion.fit.moments import SecondMoment, attentions
from rehead.data import IGNORE, evaluation_blocks
from rehead.stages import listening

pytestmark = pytest.mark.heavy

GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5, qkv_bias=True)
MLA = LatentConfig(n_query_head=6, kv_lora_rank=9, qk_nope_head_dim=4, v_head_dim=5)
KINDS = {
    "learned positions": GQA,
    "rope": replace(GQA, rope=RopeConfig()),
    "window": replace(GQA, window=5),
    "normed": replace(GQA, rope=RopeConfig(), qk_norm_eps=1e-6),
    "tied": GroupedConfig(n_query_head=6, n_kv_head=1, head_dim=7, tie_kv=True),
}
kinds = pytest.mark.parametrize("attention", KINDS.values(), ids=KINDS)


def blocks_of(ids, length=16, batch=3):
    return list(evaluation_blocks(ids, length, batch))


def statistics_of(model, blocks, *, gradients, seed=0):
    with tempfile.TemporaryDirectory() as folder:
        found = gather(model, iter(blocks), Path(folder), needs={"pair"} if gradients else (), seed=seed)
        return [statistics.in_memory() for statistics in found]


def labels_of(logits, noise):
    """Drawn from the model's own predictions: where the running sum of probabilities passes the noise."""
    running = logits.double().softmax(-1).flatten(0, -2).cumsum(-1)
    return (running < torch.from_numpy(noise)[:, None]).sum(-1)


def likeliest_pair(x, g):
    """Four rounds on the whole covariance of g x^T, 1 % of the mean variance added in each."""
    whole = torch.einsum("ti,tj,tk,tl->ijkl", g, g, x, x)
    outputs = torch.eye(g.shape[1])
    for _ in range(4):
        inputs = torch.einsum("ij,ijkl->kl", torch.linalg.inv(outputs), whole)
        inputs = inputs / inputs.norm()
        inputs = inputs + 0.01 * inputs.trace() / len(inputs) * torch.eye(len(inputs))
        outputs = torch.einsum("ijkl,kl->ij", whole, torch.linalg.inv(inputs))
        outputs = outputs / outputs.norm()
        outputs = outputs + 0.01 * outputs.trace() / len(outputs) * torch.eye(len(outputs))
    return inputs, outputs


def stored(model, blocks, seed=0):
    """By adding 0 to every key and value, and keeping it all: E[x x^T] and the pair of x and g."""
    layers, seen, zeros = attentions(model), [], []
    hooks = []
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(lambda _, args: seen.append(args[0])))
        for part in (layer.k_proj, layer.v_proj):
            if part is not None:

                def add(_, args, output):
                    zeros.append(torch.zeros_like(output).requires_grad_())
                    return output + zeros[-1]

                hooks.append(part.register_forward_hook(add))
    inputs, gradients = [[] for _ in layers], [[] for _ in layers]
    noise = np.random.default_rng(seed)
    for ids, targets in blocks:
        seen.clear(), zeros.clear()
        logits, counts = model(ids), (targets != IGNORE).flatten()
        labels = labels_of(logits.detach(), noise.random(targets.numel()))
        likely = logits.detach().float().double().softmax(-1).float().flatten(0, 1)[counts]
        error = likely - F.one_hot(
            labels[counts], likely.shape[1]
        )  # the loss's gradient, likelihoods in float32
        found = torch.autograd.grad((logits.flatten(0, 1)[counts] * error).sum(), zeros)
        each = len(zeros) // len(layers)
        for index in range(len(layers)):
            inputs[index].append(seen[index].detach().flatten(0, 1)[counts])
            parts = torch.cat(found[index * each : (index + 1) * each], 2)
            gradients[index].append(parts.flatten(0, 1)[counts])
    for hook in hooks:
        hook.remove()
    rows = [(torch.cat(x), torch.cat(g)) for x, g in zip(inputs, gradients, strict=True)]
    ones = [torch.cat([x, torch.ones(len(x), 1)], 1) for x, _ in rows]
    return [x.mT @ x / len(x) for x in ones], [likeliest_pair(x, g) for x, g in rows]


def check(model, blocks, expected, seed=0):
    """Layer by layer as of the whole model at once, to rounding."""
    found = statistics_of(model, blocks, gradients=True, seed=seed)
    for statistics, inputs, pair in zip(found, *expected, strict=True):
        torch.testing.assert_close(statistics.inputs, inputs, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(statistics.pair, pair, rtol=1e-10, atol=1e-12)


@kinds
def test_those_of_stored_activations(attention, gpt, words):
    model = gpt(attention)
    ids = words(150)
    expected = stored(model, blocks_of(ids))
    check(model, blocks_of(ids), expected)
    for mutant in (blocks_of(ids)[:-1], blocks_of(ids, 15), blocks_of(words(150, seed=1))):
        with pytest.raises(AssertionError):
            check(model, mutant, expected)
    with pytest.raises(AssertionError):  # other labels
        check(model, blocks_of(ids), expected, seed=1)


def test_gradients_of_a_forward_by_hand(gpt, words):
    """One layer written out: embedding, norm, heads in a loop, MLP, head."""
    model = gpt(replace(GQA, n_query_head=4, o_bias=True), n_layer=1)
    (ids, targets), *_ = blocks_of(words(49))
    (layer,), w = model.layers, dict(model.named_parameters())
    D = model.config.n_embd
    x = w["embed_tokens.weight"][ids] + w["embed_positions.weight"][: ids.shape[1]]
    normed = F.layer_norm(x, (D,), layer.input_layernorm.weight, layer.input_layernorm.bias)

    def linear(name, source):
        return source @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    query, key, value = (linear(f"layers.0.self_attn.{n}_proj", normed) for n in "qkv")
    heads = []
    for h in range(4):
        g = h // 2
        scores = query[..., 4 * h : 4 * h + 4] @ key[..., 4 * g : 4 * g + 4].mT / 2
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ value[..., 5 * g : 5 * g + 5])
    x = x + linear("layers.0.self_attn.o_proj", torch.cat(heads, -1))
    second = layer.post_attention_layernorm
    hidden = F.layer_norm(x, (D,), second.weight, second.bias)
    x = x + linear(
        "layers.0.mlp.down_proj", F.gelu(linear("layers.0.mlp.up_proj", hidden), approximate="tanh")
    )
    logits = F.layer_norm(x, (D,), w["norm.weight"], w["norm.bias"]) @ w["head.weight"].T
    torch.testing.assert_close(logits, model(ids))
    labels = labels_of(logits.detach(), np.random.default_rng(3).random(targets.numel()))
    loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    g = torch.cat(torch.autograd.grad(loss, [key, value]), 2).flatten(0, 1)
    (statistics,) = statistics_of(model, [(ids, targets)], gradients=True, seed=3)
    rows = normed.flatten(0, 1).detach()
    torch.testing.assert_close(statistics.pair, likeliest_pair(rows, g), rtol=1e-4, atol=1e-6)
    rows = torch.cat([rows, torch.ones(len(g), 1)], 1)
    torch.testing.assert_close(statistics.inputs, rows.mT @ rows / len(rows))


@kinds
def test_however_it_is_batched(attention, gpt, words):
    model, ids = gpt(attention), words(130)
    one, other = (statistics_of(model, blocks_of(ids, batch=size), gradients=True) for size in (1, 5))
    for here, there in zip(one, other, strict=True):
        torch.testing.assert_close(here.inputs, there.inputs)
        torch.testing.assert_close(here.pair, there.pair, rtol=1e-3, atol=1e-5)


def test_a_list_of_uneven_batches(gpt, words):
    """The last one has fewer rows; the annotations allow it, however often they are checked."""
    model, blocks = gpt(GQA, n_layer=1), blocks_of(words(60))
    assert [len(ids) for ids, _ in blocks] == [3, 1]
    for _ in range(20):
        statistics_of(model, blocks, gradients=False)


def test_what_is_no_target_does_not_count(gpt, words):
    """The rest of a last block: whatever stands there."""
    model = gpt(GQA)
    (ids, targets), *_ = blocks_of(words(49))
    targets[1, 9:] = IGNORE
    garbage = ids.clone()
    garbage[1, 9:] = 5
    one, other = (statistics_of(model, [(some, targets)], gradients=True) for some in (ids, garbage))
    for here, there in zip(one, other, strict=True):
        torch.testing.assert_close(here.inputs, there.inputs)
        torch.testing.assert_close(here.pair, there.pair)
    assert one[0].inputs[-1, -1] == 1  # the constant: the mean is over what counts
    all_count = statistics_of(model, [(ids, targets.clamp(min=0))], gradients=False)
    assert not torch.allclose(all_count[0].inputs, one[0].inputs)


def test_without_gradients_none_are_taken(gpt, words):
    model = gpt(GQA)
    model.head.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    seen = []
    for statistics in statistics_of(model, blocks_of(words(60)), gradients=False):
        assert statistics.pair is None
        assert statistics.inputs.shape == (24, 24)
    assert not any(seen)


def test_a_latent_has_inputs_only(gpt, words):
    for statistics in statistics_of(gpt(MLA), blocks_of(words(60)), gradients=False):
        assert statistics.inputs.shape == (24, 24)
        assert statistics.pair is None


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was(gradients, training, gpt, words):
    """Mode, what needs gradients, the gradients there were, hooks; also where the work is broken off."""
    model = gpt(replace(GQA, attn_pdrop=0.5), resid_pdrop=0.5).train(training)
    model.layers[1].requires_grad_(False)
    model.head.weight.grad = torch.full_like(model.head.weight, 7.0)
    needed = [weight.requires_grad for weight in model.parameters()]

    def broken(stage):
        if stage.done == 3:
            raise InterruptedError

    one = statistics_of(model, blocks_of(words(60)), gradients=gradients)
    with pytest.raises(InterruptedError), listening(broken):
        statistics_of(model, blocks_of(words(60)), gradients=gradients)
    assert model.training is training
    assert [weight.requires_grad for weight in model.parameters()] == needed
    assert (model.head.weight.grad == 7).all()
    assert all(weight.grad is None for weight in model.layers.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.is_grad_enabled()
    other = statistics_of(model.eval(), blocks_of(words(60)), gradients=gradients)
    for here, there in zip(one, other, strict=True):  # without dropout
        assert torch.equal(here.inputs, there.inputs)


def test_in_float32_sums_are_float64(gpt, words):
    for statistics in statistics_of(gpt(GQA).float(), blocks_of(words(60)), gradients=True):
        assert {part.dtype for part in (statistics.inputs, *statistics.pair)} == {torch.float64}


@pytest.mark.parametrize("gradients", [False, True])
def test_one_batch_in_one_layer_is_in_memory(gradients, gpt, words):
    """When a layer reads a batch, nothing of earlier batches or layers is alive, however long the text."""
    model, alive, most = gpt(GQA), [], []

    def note(_, args, output):
        gc.collect()
        most.append(sum(one() is not None for one in alive))
        alive[:] = [weakref.ref(args[0]), weakref.ref(output)]

    for layer in model.layers:
        layer.register_forward_hook(note)
    gc.freeze()  # what was there before need not be looked at every time
    try:
        statistics_of(model, blocks_of(words(230)), gradients=gradients)
    finally:
        gc.unfreeze()
    assert len(most) == 5 * len(model.layers) * (1 + gradients)
    assert not any(most[1:])


def test_a_moment_holds_one_matrix():
    moment = SecondMoment()
    assert moment.mean() is None
    rows = torch.randn(50, 7)
    for some in rows.split(8):
        moment.add(some)
    torch.testing.assert_close(moment.mean(), rows.mT @ rows / 50)
    held = {name: value for name, value in vars(moment).items() if isinstance(value, torch.Tensor)}
    assert {name: tuple(value.shape) for name, value in held.items()} == {"total": (7, 7)}


def test_moments_that_weigh():
    statistics = Statistics(inputs=torch.eye(4))
    inputs, outputs = statistics.weighing(("inputs",))
    assert torch.equal(inputs, torch.eye(3))
    assert outputs is None
    assert statistics.weighing(()) == (None, None)
