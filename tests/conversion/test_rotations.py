"""Rotary heads into MLA with a decoupled rotary part: against sums over all pairs of tokens, written out."""

import cmath
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig, SummedConfig
from rehead.attention.rope_scaling import LinearScaling, LongRopeScaling, YarnScaling
from rehead.conversion.base import CannotConvert, Statistics
from rehead.conversion.converter import Converter
from rehead.conversion.fit import turns as gathered
from rehead.conversion.fit.directions import Directions
from rehead.conversion.fit.layerwise import gather
from rehead.conversion.fit.moments import attentions
from rehead.conversion.fit.turns import Turns, sensitivity
from rehead.conversion.frequencies import best_pairs
from rehead.conversion.search import path
from rehead.conversion.steps.biases import FoldBiases
from rehead.conversion.steps.narrow import Narrow
from rehead.conversion.steps.rotations import KeepRotations, beside, directions
from rehead.conversion.target import Target
from rehead.conversion.texts import Passage
from rehead.errors import ConfigError
from rehead.measure.stored import lost_rows
from rehead.report.conversion import _reached as reached

WIDTH, VOCAB = 23, 29
ROPE = RopeConfig(theta=100.0)
GQA = GroupedConfig(n_query_head=6, n_kv_head=3, head_dim=8, v_head_dim=5, rope=ROPE)
SOURCES = {
    "wider than the model": GQA,
    "narrower than the model": GroupedConfig(
        n_query_head=4, n_kv_head=2, head_dim=6, v_head_dim=3, rope=ROPE
    ),
    "interleaved": GroupedConfig(
        n_query_head=6, n_kv_head=3, head_dim=8, v_head_dim=5, rope=RopeConfig(layout="interleaved")
    ),
    "partial": GroupedConfig(
        n_query_head=6, n_kv_head=2, head_dim=8, v_head_dim=5, rope=RopeConfig(partial_rotary_factor=0.5)
    ),
    "scaled": GroupedConfig(
        n_query_head=4,
        n_kv_head=2,
        head_dim=6,
        rope=RopeConfig(
            scaling=LongRopeScaling(factors=(1.0, 2.0), attention_factor=1.3), partial_rotary_factor=0.67
        ),
    ),
    "biases": replace(GQA, qkv_bias=True, o_bias=True),
    "biases, partial": GroupedConfig(
        n_query_head=4,
        n_kv_head=2,
        head_dim=8,
        v_head_dim=3,
        rope=RopeConfig(partial_rotary_factor=0.5),
        qkv_bias=True,
    ),
    "scaled as DeepSeek's": replace(
        GQA,
        rope=RopeConfig(
            scaling=YarnScaling(
                factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0
            )
        ),
    ),
    "mqa, window": GroupedConfig(n_query_head=6, n_kv_head=1, head_dim=8, v_head_dim=5, rope=ROPE, window=7),
}

NORMED = {
    "norms": replace(GQA, qk_norm_eps=1e-6),
    "norms, biases": replace(SOURCES["biases, partial"], qk_norm_eps=1e-3),
    "norms, zero-centered": replace(
        SOURCES["narrower than the model"], qk_norm_eps=1e-6, qk_norm="zero_centered_rmsnorm"
    ),
}


@pytest.fixture
def text():
    return torch.randint(VOCAB, (200,), generator=torch.Generator().manual_seed(5))


@pytest.fixture(params=SOURCES)
def source(request):
    return SOURCES[request.param]


def rotated(source):
    return source.rope.rotated(source.head_dim)


def rms(rows, source):
    """The RMS of every head of (L, H E), (L, H)."""
    return np.sqrt((rows.reshape(len(rows), -1, source.head_dim) ** 2).mean(-1) + source.qk_norm_eps)


def norm_of(weight, source):
    return weight.numpy() + (source.qk_norm == "zero_centered_rmsnorm")


def complex_heads(rows, n_head, rope):
    """The rotated numbers of each head of a token as complex numbers, by definition."""
    heads = rows.reshape(n_head, -1)[:, : rope.rotated(rows.size // n_head)]
    if rope.layout == "half-split":
        first, second = heads[:, : heads.shape[1] // 2], heads[:, heads.shape[1] // 2 :]
    else:
        first, second = heads[:, 0::2], heads[:, 1::2]
    return first + 1j * second


@torch.no_grad()
def divergence(model, other, ids):
    """KL of the predictions of `other` from those of `model`, in nats per token."""
    ours, theirs = (each(ids).log_softmax(-1) for each in (model, other))
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


def test_all_rotations_kept_are_exact(gpt, apart, source):
    model = gpt(source)
    result, certificate = rehead.convert(model, "mla", target="uneven", calibration=torch.arange(60) % VOCAB)
    assert result.config.attention[0].qk_rope_head_dim == source.n_kv_head * rotated(source)
    assert certificate.exact
    assert apart(model, result) < 1e-12


def test_a_rotary_part_of_another_magnitude_has_queries_that_make_up_for_it(gpt, apart):
    model = gpt(GQA)
    result, _ = rehead.convert(model, "mla", target="uneven", method="svd")
    (wanted, *_) = result.config.attention
    larger = replace(wanted.rope, scaling=replace(wanted.rope.scaling, attention_factor=1.2))
    result, certificate = rehead.convert(model, replace(wanted, rope=larger), method="svd")
    assert certificate.exact
    assert apart(model, result) < 1e-12


def test_rotations_that_a_text_does_not_see_are_lost_all_the_same(gpt):
    """Fewer tokens than directions of the keys: what is left out of them weighs nothing, and is still there."""
    model = gpt(replace(GQA, n_query_head=8, n_kv_head=8))
    target = Target(to="mla", target="uneven", kv_fraction=0.6)
    converter = Converter(model, None, [Passage(name="ids", ids=np.array([5, 7, 9, 11]))])
    result, records = converter.follow(converter.attentions(target))
    assert max(record.lost for record in records) < 1e-9
    assert divergence(model, result, torch.arange(16)[None]) > 0.01
    assert min(record.converted[0].residual for record in records) > 0.01


@pytest.mark.parametrize("method", ["weighted", "whitened", "svd"])
def test_what_rotates_leaves_exact_zeros_in_the_latent(gpt, text, method):
    """Rounding errors in their place would be rows that no smaller format holds, and that nobody misses."""
    source = replace(GQA, n_query_head=4, n_kv_head=2)
    result, certificate = rehead.convert(
        gpt(source), "mla", target="uneven", calibration=text, method=method, rope_dim=12, kv_fraction=0.6
    )
    assert certificate.layers[0].steps == ["keep-rotations", "narrow"]
    sizes = [layer.self_attn.kv_b_proj.weight.norm(dim=1) for layer in result.layers]
    assert min(int((size == 0).sum()) for size in sizes) >= 8  # two frequencies of two heads
    assert all(size[size > 0].min() > 1e-4 * size.max() for size in sizes)
    assert lost_rows(result, "fp16", "q8_0") == {}


def test_fewer_rotations_lose_more(gpt, text, source):
    """By the loss's own measure: KL to the source, on the text it was fitted to."""
    model = gpt(source)
    lost = []
    for width in range(2, source.n_kv_head * rotated(source) + 1, 2):
        narrow, _ = rehead.convert(model, "mla", target="uneven", calibration=text, rope_dim=width)
        _, rank = beside(source, width, WIDTH)
        wide = [replace(layer, kv_lora_rank=rank) for layer in narrow.config.attention]
        result, certificate = rehead.convert(model, wide, calibration=text)
        assert certificate.layers[0].steps == ["keep-rotations"]
        lost.append(divergence(model, result, text[:48].view(3, 16)))
    assert lost[-1] < 1e-12 < lost[0]
    assert min(lost[:-1]) > 0
    assert lost[0] == max(lost)


@pytest.mark.parametrize("source", (SOURCES | NORMED).values(), ids=SOURCES | NORMED)
def test_sums_are_those_over_all_pairs_of_tokens(source):
    """Gradients of scores from autograd, with the attention written out. Squared, over p, they sum to Var(d)."""
    torch.manual_seed(3)
    module = source.build(WIDTH).requires_grad_(False)
    for weight in module.parameters():
        weight.copy_(0.3 * torch.randn_like(weight))
    x, pull = torch.randn(2, 9, WIDTH), torch.randn(2, 9, source.n_query_head * source.v_head_dim)
    turns = Turns(18)
    turns.add(module, x, pull)
    own_angles = source.rope.frequencies(source.head_dim).tolist()
    rows = [own_angles]
    for step in (-4, -3, -2, -1, 1, 2, 3, 4):  # over those of pairs near it
        near = dict(enumerate(own_angles))
        rows.append([angle - near.get(f + step, 0.0) for f, angle in enumerate(own_angles)])
    expected = np.zeros((1 + 2 * len(rows), source.n_query_head, rotated(source) // 2))
    for row, gradient in zip(x, pull, strict=True):
        query = module.q_proj(row).view(1, 9, source.n_query_head, -1)
        key = module.k_proj(row).view(1, 9, source.n_kv_head, -1)
        if source.qk_norm_eps:
            for heads, norm in ((query, module.q_norm), (key, module.k_norm)):
                size = torch.from_numpy(rms(heads[0].flatten(1).numpy(), source))
                heads.mul_(torch.from_numpy(norm_of(norm.weight, source)) / size[..., None])
        query, key = (module.rotary(heads)[0] for heads in (query, key))
        value = module.v_proj(row).view(9, source.n_kv_head, -1)
        for head in range(source.n_query_head):
            own = head // source.group
            scores = (query[:, head] @ key[:, own].T * source.head_dim**-0.5).requires_grad_()
            far = torch.arange(9)[:, None] - torch.arange(9)
            unseen = (far < 0) | (far >= (source.window or 9))
            read = scores.masked_fill(unseen, -math.inf).softmax(-1)
            out = read @ value[:, own]
            wanted = gradient.view(9, source.n_query_head, -1)[:, head]
            (slope,) = torch.autograd.grad((out * wanted).sum(), scores)
            read = read.detach()
            variance = (slope.square() / read).where(~unseen, 0).sum(1)
            asked = [
                complex_heads(q.flatten().numpy(), source.n_query_head, source.rope)[head] for q in query
            ]
            held = [complex_heads(k.flatten().numpy(), source.n_kv_head, source.rope)[own] for k in key]
            for m in range(9):
                for n in range(9):
                    for f in range(len(own_angles)):
                        size = float(read[m, n] * variance[m]) * abs(asked[m][f]) ** 2 * abs(held[n][f]) ** 2
                        turns_by = [cmath.exp(1j * angles[f] * (n - m)) for angles in rows]
                        real, imaginary = zip(*((turn.real, turn.imag) for turn in turns_by), strict=True)
                        expected[:, head, f] += size * np.array([1, *real, *imaginary])
    np.testing.assert_allclose(turns.mean().numpy(), expected / 18, rtol=1e-10, atol=1e-14)


def test_no_error_of_the_scores_costs_more():
    """The loss's change, from autograd, is at most the weighed size of the error, and reaches it."""
    generator = torch.Generator().manual_seed(6)
    scores, along, *errors = torch.randn(202, 7, generator=generator)
    scores.requires_grad_()
    (slope,) = torch.autograd.grad(scores.softmax(0) @ along, scores)
    weight = sensitivity(scores.detach().softmax(0), along)
    for error in errors:
        assert (slope @ error) ** 2 <= weight @ error.square()
    worst = along - scores.detach().softmax(0) @ along
    assert float((slope @ worst) ** 2) == pytest.approx(float(weight @ worst.square()))


def some_directions(n_pair, n_kv_head, seed, group=2):
    """Directions of random keys that depend on each other, the angles by which they turn, and what the keys do."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(500, n_kv_head * n_pair, dtype=torch.complex128, generator=generator)
    z = z @ torch.randn(n_kv_head * n_pair, n_kv_head * n_pair, dtype=torch.complex128, generator=generator)
    keys = (z.mT @ z.conj() / 500).view(n_kv_head, n_pair, n_kv_head, n_pair)
    total = torch.rand(n_kv_head * group, n_pair, generator=generator) + 0.1
    means = torch.rand(9, n_kv_head * group, n_pair, generator=generator) * torch.exp(
        2j * torch.pi * torch.rand(9, n_kv_head * group, n_pair, generator=generator)
    )
    means[0] *= 0.3  # most pairs had better turn by an angle near theirs than stand still
    turns = torch.cat([total[None], total * means.real, total * means.imag])
    return Directions(turns, keys), keys, total, means


def test_directions_are_the_best_ones():
    """No other directions of two pairs, turned by the angle of one, save more, and they save what is said."""
    found, keys, total, means = some_directions(n_pair=2, n_kv_head=3, seed=2)
    torch.testing.assert_close(found.constant, means[0])
    keys = keys.flatten(2).flatten(0, 1)
    taken, made, saved = found.along([0, 1], 1, 2)
    taken, made = taken.flatten(1), made.flatten(1)
    before = total * (1 - means[0].abs().square())
    left = torch.stack([1 - means[5, :, 0].abs().square(), torch.zeros(6)], dim=1)  # pair 0 by the angle of 1
    rate = (before - total * left).clamp(min=0).view(3, 2, 2).sum(1).flatten() / keys.diagonal().real

    def saves(made, taken):
        rest = torch.eye(6, dtype=torch.complex128) - made @ taken
        return float((rate * (keys - rest @ keys @ rest.mH).diagonal().real).sum())

    best = saves(made.mT, taken)
    assert saved.tolist() == sorted(saved.tolist(), reverse=True)
    assert best == pytest.approx(float(saved.sum()))
    torch.testing.assert_close(saved, found.saving([0, 1], 1)[:2])
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        other = torch.randn(6, 2, dtype=torch.complex128, generator=generator)
        assert saves(other, torch.linalg.lstsq(other, torch.eye(6, dtype=other.dtype)).solution) <= best
        moved = taken + 0.1 * torch.randn(2, 6, dtype=torch.complex128, generator=generator)
        assert saves(keys @ moved.mH @ torch.linalg.inv(moved @ keys @ moved.mH), moved) <= best


def test_all_directions_of_a_pair_are_the_keys():
    found, *_ = some_directions(n_pair=3, n_kv_head=2, seed=4)
    taken, made, _ = found.along([1], 1, 2)
    torch.testing.assert_close(made[:, :, 0].mT @ taken[:, :, 0], torch.eye(2, dtype=torch.complex128))


@pytest.mark.parametrize("n_pair", range(1, 11))
def test_the_pairs_chosen_save_most(n_pair):
    """Of all ways to put five pairs into groups of neighbours, each with one's angle, in two layers together."""
    layers = [some_directions(n_pair=5, n_kv_head=2, seed=seed)[0] for seed in (5, 6)]
    chosen = best_pairs(layers, n_pair)
    assert len(chosen) == n_pair

    def ways(start):
        """Each way to group the pairs from `start` on: [(group, to, many), ...]."""
        if start == 5:
            yield []
        for end in range(start + 1, 6):
            for rest in ways(end):
                for to, many in product(range(start, end), range(3)):
                    yield [(range(start, end), to, many), *rest]

    def saved(way):
        return sum(float(one.saving(group, to)[:many].sum()) for group, to, many in way for one in layers)

    best = max((way for way in ways(0) if sum(many for *_, many in way) == n_pair), key=saved)
    assert chosen == sorted(to for _, to, many in best for _ in range(many))


def test_keys_turn_by_the_angle_that_saves_most():
    found, *_ = some_directions(n_pair=12, n_kv_head=2, seed=7)
    carriers = found.carriers([0, 5])
    for pair in range(12):
        near = {to: float(found.saved(pair, to).sum()) for to in (0, 5) if abs(to - pair) <= 4}
        near = {pair: 1.0} if pair in (0, 5) else {to: saved for to, saved in near.items() if saved}
        own = [to for to, carried in carriers.items() if pair in carried]
        assert own == ([] if not near else [max(near, key=near.get)])


@pytest.mark.parametrize("source", (SOURCES | NORMED).values(), ids=SOURCES | NORMED)
def test_scores_are_those_of_the_formula(source):
    """Kept directions turn, and the rest is multiplied by a constant: every score written out in complex numbers.

    A norm divides a query by its RMS before that, and a score by the RMS of the key.
    """
    torch.manual_seed(4)
    module = source.build(WIDTH).requires_grad_(False)
    weights = {
        name: weight.copy_(0.3 * torch.randn_like(weight)) for name, weight in module.named_parameters()
    }
    n_pair, n_query_head = rotated(source) // 2, source.n_query_head
    size = torch.rand(n_query_head, n_pair)
    seen = torch.randn(50, WIDTH + 1) * torch.linspace(0.2, 3, WIDTH + 1)
    inputs = seen.mT @ seen / 50
    means = 0.8 * torch.rand(9, *size.shape) * torch.exp(2j * torch.pi * torch.rand(9, *size.shape))
    turns = torch.cat([size[None], size * means.real, size * means.imag])
    statistics = Statistics(inputs=inputs, turns=turns)
    target = Target(to="mla", target="uneven", rope_dim=2 * max(1, n_pair - 1)).attention(source, WIDTH)
    (result,) = KeepRotations().steps(source, target, WIDTH)
    done = KeepRotations().convert(weights, source, result, statistics, "weighted")
    other = result.build(WIDTH).requires_grad_(False)
    other.load_state_dict(done.weights)
    found = directions(weights, source, statistics)
    carriers = found.carriers(range(max(1, n_pair - 1)))
    x = torch.randn(7, WIDTH)
    query, key = (module.q_proj(x).numpy(), module.k_proj(x).numpy())
    sizes = np.ones((7, source.n_kv_head))
    if source.qk_norm_eps:
        sizes = rms(key, source)
        query = query / rms(query, source).repeat(source.head_dim, axis=1)
        query *= np.tile(norm_of(weights["q_norm.weight"], source), n_query_head)
        key = key * np.tile(norm_of(weights["k_norm.weight"], source), source.n_kv_head)
    angles = source.rope.frequencies(source.head_dim).tolist()
    squared = 1.0 if source.rope.scaling is None else source.rope.scaling.magnitude**2
    scores = np.full((n_query_head, 7, 7), -np.inf)
    for m in range(7):
        for n in range(max(0, m + 1 - (source.window or 7)), m + 1):
            q = complex_heads(query[m], n_query_head, source.rope)
            k = complex_heads(key[n], source.n_kv_head, source.rope)
            plain = query[m].reshape(n_query_head, -1)[:, rotated(source) :]
            still = key[n].reshape(source.n_kv_head, -1)[:, rotated(source) :]
            for head in range(n_query_head):
                own, total = head // source.group, 0.0
                average = usual(weights, source, inputs)
                rest = k / average[:, None]
                for to, carried in carriers.items():
                    taken, made, _ = (part.numpy() for part in found.along(carried, to, 1))
                    part = np.einsum("kp,kp->", taken[0], (k / average[:, None])[:, carried])
                    rest[:, carried] -= made[0] * part
                    for index, f in enumerate(carried):
                        beside = found.beside[to - f + 4, head, f].item()
                        turned = beside * made[0, own, index] * part * average[own]
                        turned *= cmath.exp(1j * angles[to] * (n - m))
                        total += squared * (np.conj(q[head, f]) * turned).real
                for f in range(n_pair):
                    constant = found.constant[head, f].item()
                    total += squared * (np.conj(q[head, f]) * constant * rest[own, f] * average[own]).real
                scores[head, m, n] = (total + plain[head] @ still[own]) / sizes[n, own]
    expected = torch.from_numpy(scores * source.head_dim**-0.5).softmax(-1)
    torch.testing.assert_close(other.weights(x[None])[0], expected)


def usual(weights, source, inputs):
    """The RMS of each head's keys for inputs [x; 1] of these second moments; 1 without norms."""
    if not source.qk_norm_eps:
        return np.ones(source.n_kv_head)
    bias = weights.get("k_proj.bias", torch.zeros(source.n_kv_head * source.head_dim))
    rows = torch.cat([weights["k_proj.weight"], bias[:, None]], dim=1)
    each = (rows @ inputs @ rows.mT).diagonal().view(source.n_kv_head, -1)
    return each.mean(1).sqrt().numpy()


@pytest.mark.parametrize("source", NORMED.values(), ids=NORMED)
def test_norms_beside_a_rotary_part_are_exact(gpt, apart, source):
    """Where all rotates, the latent holds the rest and the cache the RMS of every key: any text, and with a cache."""
    model, width = gpt(source), source.n_kv_head * rotated(source)
    _, rank = beside(source, width, WIDTH)
    lossy = Target(to="mla", target="uneven", rope_dim=width, kv_rank=1).attention(source, WIDTH)
    result, certificate = rehead.convert(model, replace(lossy, kv_lora_rank=rank))
    assert certificate.exact
    assert certificate.layers[0].steps == ["keep-rotations"]
    assert apart(model, result) < 1e-12
    assert result.config.attention[0].kv_numbers() == rank + width + source.n_kv_head
    ids = torch.arange(6)[None]
    assert torch.equal(rehead.generate(result, ids, 20, 0), rehead.generate(model, ids, 20, 0))


def test_a_head_without_keys_beside_norms(gpt, apart, text):
    """As of a pruned head: nothing divides by its size."""
    model = gpt(NORMED["norms"])
    model.layers[0].self_attn.k_proj.weight.data[:8] = 0
    result, _ = rehead.convert(
        model, "mla", target="uneven", rope_dim=22, kv_rank=14, calibration=text, method="weighted"
    )
    assert apart(model, result) < 1
    assert all(weight.isfinite().all() for weight in result.parameters())


def test_long_prompts_with_norms_are_expanded():
    """Scales of keys are for the reference kernel, which holds all scores: of few tokens at once."""
    narrow = Target(to="mla", target="uneven", kv_fraction=0.25).attention(NORMED["norms"], WIDTH)
    assert replace(narrow, qk_norm_eps=None, qk_norm_head_dim=None).absorbs_below == math.inf
    module = narrow.build(WIDTH)
    assert [module.choice(n, 100).form for n in (1, 15, 16, 500)] == ["absorbed"] * 2 + ["expanded"] * 2
    assert "each key has a scale" in str(module.choice(1, 100))


def test_biases_of_normed_keys_stay_where_they_are():
    """A key is divided by its RMS, so its bias is not one number in all scores of a query."""
    target = Target(to="mla", target="uneven", rope_dim=4, kv_rank=9)
    latent = target.attention(NORMED["norms, biases"], WIDTH)
    assert "its bias with it" in FoldBiases().refusal(latent)
    plain = replace(latent, qk_norm_eps=None, qk_norm_head_dim=None)
    assert not FoldBiases().refusal(plain)
    wanted = replace(latent, latent_norm=True, qkv_bias=False, o_bias=True, q_lora_rank=WIDTH + 1)
    with pytest.raises(CannotConvert):
        path(latent, wanted, WIDTH)
    assert path(plain, replace(wanted, qk_norm_eps=None, qk_norm_head_dim=None), WIDTH)


def test_norms_beside_a_rotary_part_in_a_part_of_the_cache(gpt, text):
    """The RMS of keys count as numbers of the cache; a text tells what to keep."""
    model, losses = gpt(NORMED["norms"], n_step=20), {}
    for method in ("weighted", "svd"):
        result, _ = rehead.convert(
            model, "mla", target="uneven", kv_fraction=0.5, calibration=text, method=method
        )
        assert result.config.attention[0].kv_numbers() == int(0.5 * 39)
        losses[method] = divergence(model, result, text[:176].view(11, 16))
    assert losses["weighted"] < losses["svd"]


def test_the_frequencies_are_those_that_matter(gpt, text):
    """One pair of a KV head is large in each layer, two more in both: the sum over layers decides."""
    model = gpt(GQA, std=0.02)
    for layer, (pair, size) in zip(model.layers, ((1, 4.0), (3, 1.0)), strict=True):
        for projection, head in ((layer.self_attn.k_proj, 1), (layer.self_attn.q_proj, 2)):
            rows = projection.weight.data.view(-1, 8, WIDTH)
            rows[head, [pair, pair + 4]] += size * torch.randn(2, WIDTH)
        layer.self_attn.v_proj.weight.data += torch.randn(15, WIDTH)
        layer.self_attn.o_proj.weight.data += torch.randn(WIDTH, 30)
    for method in ("weighted", "svd"):
        for rope_dim, pairs in ((2, [1]), (4, [1, 3])):
            result, _ = rehead.convert(
                model, "mla", target="uneven", rope_dim=rope_dim, kv_rank=20, calibration=text, method=method
            )
            for attention in result.config.attention:
                torch.testing.assert_close(attention.rope.frequencies(rope_dim), ROPE.frequencies(8)[pairs])


@pytest.mark.parametrize("method", ["weighted", "svd"])
def test_frequencies_are_those_of_the_heads_that_share_a_kv_head(method, gpt, text):
    """The same function with its query heads in another order has the same rotary part."""
    model = gpt(replace(GQA, n_query_head=8, n_kv_head=4), std=0.5)
    other, _ = rehead.convert(model, head_map="modular", to="gqa", n_kv_head=4)
    options = {"target": "uneven", "rope_dim": 4, "kv_rank": 20, "calibration": text, "method": method}
    results = [rehead.convert(one, "mla", **options)[0] for one in (model, other)]
    assert results[0].config == results[1].config
    assert divergence(*results, text[:48].view(3, 16)) < 1e-12


def test_summed_queries_choose_frequencies(gpt, text):
    model = gpt(SummedConfig(n_query_head=6, n_kv_head=2, head_dim=8, rope=ROPE))
    heads, _ = rehead.convert(model, "mha")
    for method in ("svd", "weighted"):
        options = {"target": "uneven", "rope_dim": 4, "kv_rank": 20, "calibration": text, "method": method}
        results = [rehead.convert(one, "mla", **options)[0] for one in (model, heads)]
        assert divergence(*results, text[:48].view(3, 16)) < 1e-12


@pytest.mark.parametrize("method", ["weighted", "svd"])
def test_biases_choose_frequencies_and_directions(method, gpt, text):
    """Keys are hardly more than biases of one pair in two heads: one direction holds both, and little is lost."""
    model = gpt(replace(GQA, qkv_bias=True), std=0.02)
    for layer in model.layers:
        for projection, heads in ((layer.self_attn.k_proj, [0, 1]), (layer.self_attn.q_proj, [1, 2])):
            rows = projection.bias.data.view(-1, 8)
            rows[heads[0], [2, 6]] += torch.tensor([3.0, -2.0])
            rows[heads[1], [2, 6]] += torch.tensor([1.0, 2.5])
        layer.self_attn.v_proj.weight.data += torch.randn(15, WIDTH)
        layer.self_attn.o_proj.weight.data += torch.randn(WIDTH, 30)
    options = {"target": "uneven", "rope_dim": 2, "kv_rank": WIDTH, "calibration": text, "method": method}
    result, _ = rehead.convert(model, "mla", **options)
    for attention in result.config.attention:
        torch.testing.assert_close(attention.rope.frequencies(2), ROPE.frequencies(8)[[2]])
    ids = text[:176].view(11, 16)
    lost = divergence(model, result, ids)
    for layer in result.layers:
        layer.self_attn.kv_a_proj_with_mqa.bias.data.zero_()
    assert divergence(model, result, ids) > 10 * lost


def test_a_narrower_latent_is_the_best_of_its_rank_and_the_rotary_part_stays():
    torch.manual_seed(6)
    source = LatentConfig(
        n_query_head=6,
        n_kv_head=3,
        kv_lora_rank=20,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=5,
        rope=ROPE,
        latent_norm=False,
    )
    weights = {name: torch.randn_like(weight) for name, weight in source.build(WIDTH).named_parameters()}
    (result,) = Narrow().steps(source, replace(source, kv_lora_rank=7), WIDTH)
    done = Narrow().convert(weights, source, result, Statistics(), "svd")
    latent, rope = done.weights["kv_a_proj_with_mqa.weight"].split([7, 4])
    assert torch.equal(rope, weights["kv_a_proj_with_mqa.weight"][20:])
    whole = (weights["kv_b_proj.weight"] @ weights["kv_a_proj_with_mqa.weight"][:20]).numpy()
    u, s, v = np.linalg.svd(whole, full_matrices=False)
    made = (done.weights["kv_b_proj.weight"] @ latent).numpy()
    np.testing.assert_allclose(made, (u[:, :7] * s[:7]) @ v[:7], atol=1e-10)
    assert done.residual == pytest.approx((s[7:] ** 2).sum() / (s**2).sum())


def test_a_latent_beside_a_rotary_part_is_fitted_where_it_is(gpt, text):
    """The second step reads the gradients of the model with fewer rotations, not those of the source."""
    model = gpt(GQA, n_step=20)
    result, certificate = rehead.convert(
        model, "mla", target="uneven", kv_fraction=0.45, calibration=text, method="weighted"
    )
    assert certificate.layers[0].steps == ["keep-rotations", "narrow"]
    attention = result.config.attention[0]
    assert attention.kv_numbers() == int(0.45 * 39) == 17
    assert attention.qk_rope_head_dim == 4
    losses = {}
    for method in ("weighted", "svd"):
        other, _ = rehead.convert(
            model, "mla", target="uneven", kv_fraction=0.45, calibration=text, method=method
        )
        losses[method] = divergence(model, other, text[:176].view(11, 16))
    assert losses["weighted"] < losses["svd"]


def test_all_rotations_are_kept_without_reading_a_text(gpt, text, monkeypatch):
    """A calibration as long as the default reads for minutes."""
    monkeypatch.setattr("rehead.conversion.converter.gather", lambda *given, **named: pytest.fail("read"))
    _, certificate = rehead.convert(gpt(GQA), "mla", target="uneven", calibration=text)
    assert certificate.exact
    assert not certificate.calibration


def test_rotary_parts_are_as_large_as_the_keys_they_are_made_of(gpt, text):
    """Whatever their rotation matters: an 8-bit cache rounds small numbers to 0, and Adam replaces small weights."""
    model = gpt(replace(GQA, rope=RopeConfig(theta=1e6)))
    result, _ = rehead.convert(model, "mla", target="uneven", rope_dim=20, calibration=text, length=16)
    for old, new in zip(model.layers, result.layers, strict=True):
        keys = old.self_attn.k_proj.weight.norm(dim=1)
        rotary = new.self_attn.kv_a_proj_with_mqa.weight[-20:].norm(dim=1)
        assert 0.25 * keys.min() < rotary.min() < rotary.max() < 4 * keys.max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_dim": 3}, r"rope_dim=3: pairs of the 24 numbers .* Use an even number, 2 to 24"),
        ({"rope_dim": 26}, r"rope_dim=26: pairs of the 24 numbers"),
        (
            {"rope_dim": 12, "kv_fraction": 0.3},
            r"kv_fraction=0.3 is 11 numbers, of which 12 are the rotary part",
        ),
        ({"kv_rank": 4, "kv_fraction": 0.3}, r"say the same thing"),
        ({"target": "rebuilt", "rope_dim": 4}, r"rope_dim=4 means nothing for rebuilt keys"),
        ({"target": "canonical", "rope_dim": 4}, r"the rotary part of --target canonical is 64 wide"),
        (
            {"rope_dim": 18, "kv_rank": 23},
            r"latent of 23 and a rotary part of 18 are 41 numbers .* more than the 39 .* --kv-rank 21 or less",
        ),
        ({"rope_dim": 24, "kv_rank": 16}, r"kv_rank=16: 15 numbers beside a rotary part of 24 .* 1 to 15"),
        ({"target": "canonical"}, r"256 \+ 64 numbers, .* are no fewer than the 39"),
    ],
)
def test_targets_that_make_no_sense(options, message):
    with pytest.raises(ConfigError, match=message):
        Target(**{"to": "mla", "target": "uneven"} | options).attention(GQA, WIDTH)


def test_a_rotary_part_beside_a_rank_is_a_quarter_of_both():
    made = Target(to="mla", target="uneven", kv_rank=12).attention(GQA, WIDTH)
    assert (made.kv_lora_rank, made.qk_rope_head_dim) == (12, 4)


@pytest.mark.parametrize("d_model", [32, 64])  # keys and values together are 64 numbers
def test_nothing_that_was_asked_for_is_left_unused(d_model):
    """What the latent does not need keeps rotations; in the whole cache, all of them."""
    source = GroupedConfig(n_query_head=4, n_kv_head=4, head_dim=8, rope=ROPE)
    for fraction in (0.5, 0.8, 0.9, 0.97):
        made = Target(to="mla", target="uneven", kv_fraction=fraction).attention(source, d_model)
        assert int(fraction * 64) - 1 <= made.kv_numbers() <= fraction * 64
    made = Target(to="mla", target="uneven", kv_fraction=1.0).attention(source, d_model)
    assert (made.qk_rope_head_dim, made.kv_lora_rank) == (32, 32)


def test_a_latent_that_needs_less_is_not_called_rounded(gpt):
    model = gpt(GroupedConfig(n_query_head=4, n_kv_head=4, head_dim=8, rope=ROPE))  # 23 wide
    options = {"target": "uneven", "rope_dim": 4, "kv_fraction": 0.9}
    _, certificate = rehead.convert(model, "mla", **options)
    assert not certificate.exact
    assert reached(certificate, 0.9) == "42.19 %: its latent needs less than the 90 % asked for"
    _, certificate = rehead.convert(model, "mla", **options | {"kv_fraction": 0.4})
    assert reached(certificate, 0.4) == "39.06 %: 40 % rounded down to a whole rank"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope": RopeConfig(partial_rotary_factor=0.75)},
            r"heads of which 48 numbers rotate have no angles of .* 64",
        ),
        ({"head_dim": 96}, r"heads of which 96 numbers rotate have no angles of a rotary part of 64"),
        (
            {"qkv_bias": True},
            r"biases, which vLLM's and SGLang's .* leave out. Use --target uneven",
        ),
        (
            {"qk_norm_eps": 1e-6, "qk_norm_over": "projection"},
            r"over a projection: a latent has RMSNorms of single heads. Keep it as it is",
        ),
        ({"qk_norm_eps": 1e-6}, r"queries and keys have norms, .* Use --target uneven or rebuilt"),
        (
            {"rope": RopeConfig(scaling=LinearScaling(factor=2.0))},
            r"scaled rope: native MLA kernels compute other",
        ),
    ],
)
def test_what_is_not_canonical_is_refused(changes, message):
    source = GroupedConfig(n_query_head=4, n_kv_head=4, head_dim=64, rope=ROPE)
    target = Target(to="mla", target="canonical", kv_fraction=0.5)
    assert target.attention(source, 200).qk_rope_head_dim == 64
    given = Target(to="mla", target="canonical", kv_rank=20).attention(source, 200)
    assert (given.kv_lora_rank, given.qk_rope_head_dim) == (20, 64)
    for n_kv_head, rank in ((4, 256), (8, 512)):  # the wider one that is smaller than the heads' cache
        wide = replace(source, n_query_head=8, n_kv_head=n_kv_head)
        assert Target(to="mla", target="canonical").attention(wide, 2000).kv_lora_rank == rank
    with pytest.raises(ConfigError, match=message):
        target.attention(replace(source, **changes), 200)


def test_layers_that_rotate_in_different_ways_share_no_rotary_part(gpt, text, monkeypatch):
    """Which their configs tell, before a text is read."""
    monkeypatch.setattr("rehead.conversion.converter.gather", lambda *given, **named: pytest.fail("read"))
    model = gpt(GQA, replace(GQA, rope=RopeConfig(theta=77.0)))
    with pytest.raises(ConfigError, match=r"layers rotate in different ways.* Use --target rebuilt"):
        rehead.convert(model, "mla", target="uneven", kv_rank=9, calibration=text)


def test_a_rotary_part_has_no_way_back_to_heads(gpt):
    made, _ = rehead.convert(gpt(GQA), "mla", target="uneven", rope_dim=4, kv_rank=9)
    for to, n_kv_head in (("gqa", 3), ("mqa", None), ("mha", None)):
        with pytest.raises(
            ConfigError, match=r"the heads of this MLA rotate in part only\. Convert the model it was"
        ):
            rehead.convert(made, to, n_kv_head=n_kv_head)


def test_turns_are_counted_up_to_their_limit(gpt, text, monkeypatch):
    """Of whole windows, spread over the text."""
    attention = gpt(GQA).layers[0].self_attn
    inputs, pull = torch.randn(4, 5, WIDTH), torch.randn(4, 5, 30)
    monkeypatch.setattr(gathered, "TOKENS", 8)
    limited, two = Turns(20), Turns(8)
    limited.add(attention, inputs, pull)
    two.add(attention, inputs[::2], pull[::2])
    assert limited.count == two.count == 10
    assert torch.equal(limited.total, two.total)
    long = Turns(10_000)
    long.add(attention, inputs[:1], pull[:1])
    assert long.count == 5  # one window at least


def test_every_calibration_text_has_a_say_in_what_rotates(gpt, text, monkeypatch):
    monkeypatch.setattr(gathered, "TOKENS", 32)
    found = []
    for second in (text, text.flip(0)):
        texts = [Passage(name=str(i), ids=ids[:64].numpy()) for i, ids in enumerate((text, second))]
        found.append(Converter(gpt(GQA), None, texts, length=16).statistics(["turns"])[0].in_memory().turns)
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            replace(GQA, qk_norm_eps=1e-6, qk_norm_over="projection"),
            "qk_norm=rmsnorm over a projection: a latent has RMSNorms of single heads",
        ),
    ],
)
def test_what_has_no_place_is_refused(gpt, source, why):
    with pytest.raises(ConfigError, match=why):
        rehead.convert(gpt(source), "mla", target="uneven", kv_fraction=0.5)


def test_a_layer_without_rope_is_exact_beside_others(gpt, apart, text):
    """It gets a latent of its own kind; `rope_dim` is for the others."""
    still = replace(GQA, rope=None)
    model = gpt(still, GQA, learned_positions=False)
    result, certificate = rehead.convert(model, "mla", target="uneven", calibration=text)
    assert certificate.exact
    assert apart(model, result) < 1e-12
    result, _ = rehead.convert(model, "mla", target="uneven", rope_dim=4, kv_rank=20, calibration=text)
    assert [one.qk_rope_head_dim for one in result.config.attention] == [0, 4]
    with pytest.raises(ConfigError, match=r"rope_dim=4: none of its layers rotates its keys. Leave it out"):
        rehead.convert(gpt(still), "mla", target="uneven", rope_dim=4)


def test_full_width_decodes_from_as_many_numbers_as_the_heads_cache(gpt):
    for source in (GQA, SOURCES["partial"], SOURCES["mqa, window"]):
        target = Target(to="mla", target="uneven").attention(source, 200)
        assert target.kv_numbers() == source.kv_numbers()
    lossy = Target(to="mla", target="uneven", rope_dim=4).attention(GQA, 200)
    assert lossy.kv_numbers() == GQA.kv_numbers()


def test_without_rope_there_is_nothing_to_choose(gpt):
    model = gpt(GroupedConfig(n_query_head=6, n_kv_head=3, head_dim=8))
    with pytest.raises(
        ConfigError, match=r"target=uneven: none of its layers rotates its keys\. Leave it out\."
    ):
        rehead.convert(model, "mla", target="uneven", kv_fraction=0.5)
    result, _ = rehead.convert(model, "mla", kv_fraction=0.5)
    assert result.config.attention[0].qk_rope_head_dim == 0


def test_canonical_is_one_pair_of_each_frequency(gpt, text):
    """Of heads of 64: DeepSeek's own angles, half-split or interleaved."""
    source = GroupedConfig(n_query_head=4, n_kv_head=2, head_dim=64, rope=ROPE)
    wanted = Target(to="mla", target="canonical", kv_fraction=0.5).attention(source, 300)
    assert isinstance(wanted, LatentConfig)
    assert (wanted.qk_rope_head_dim, wanted.kv_lora_rank, wanted.rope) == (64, 64, ROPE)
    torch.testing.assert_close(wanted.rope.frequencies(64), ROPE.frequencies(64))


def test_turns_are_gathered_with_the_text(gpt, text, tmp_path):
    """`turns` alone leaves the pair out; both give what each gives alone."""
    model = gpt(GQA)
    blocks = [(text[None, :16], text[None, 1:17])]
    found = {}
    for needs in (("turns",), ("pair",), ("pair", "turns")):
        folder = tmp_path / "-".join(needs)
        folder.mkdir()
        found[needs] = [one.in_memory() for one in gather(model, blocks, folder, needs=needs)]
    for turns, pair, both in zip(*found.values(), strict=True):
        assert turns.pair is None
        assert pair.turns is None
        torch.testing.assert_close(both.turns, turns.turns, rtol=0, atol=0)
        torch.testing.assert_close(both.pair, pair.pair, rtol=0, atol=0)


def test_a_few_queries_at_a_time_give_the_same_sums(gpt, monkeypatch):
    module, x = attentions(gpt(GQA))[0], torch.randn(1, 30, WIDTH)
    pull = torch.randn(1, 30, GQA.n_query_head * GQA.v_head_dim)
    found = []
    for most in (2**22, 7 * 30 * GQA.group, 1):
        monkeypatch.setattr("rehead.conversion.fit.turns.WEIGHTS", most)
        turns = Turns(30)
        turns.add(module, x, pull)
        found.append(turns.mean())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-15)


def test_slow_rotations_cost_in_bfloat16_what_they_cost_in_float32():
    """Their cosines are nearer to 1 than bfloat16 tells."""
    torch.manual_seed(0)
    slow = replace(GQA, n_query_head=4, n_kv_head=2, rope=RopeConfig(theta=1e8))
    module = slow.build(WIDTH).bfloat16().requires_grad_(False)
    x, pull = torch.randn(1, 200, WIDTH), torch.randn(1, 200, slow.n_query_head * slow.v_head_dim)
    x, pull = x.bfloat16(), pull.bfloat16()
    costs = []
    for dtype in (torch.bfloat16, torch.float32):
        turns = Turns(200)
        turns.add(module.to(dtype), x.to(dtype), pull.to(dtype))
        total, cos, sin = turns.mean()[[0, 1, 10]]
        costs.append(1 - (cos.square() + sin.square()) / total.square())
    assert costs[1].min() < 1e-4
    torch.testing.assert_close(costs[0], costs[1], rtol=0.2, atol=1e-9)
