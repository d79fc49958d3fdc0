"""Turning heads onto each other: changes nothing, finds what was turned, keeps the norm."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rehead.attention import GroupedConfig, RopeConfig
from rehead.attention.rope import Rotary
from rehead.conversion.fit.align import energy, in_parts, planar_half_split, planar_interleaved, procrustes

M, E, C = 3, 6, 11
PLANAR = {"half-split": planar_half_split, "interleaved": planar_interleaved}
WAYS = {"procrustes": procrustes, **PLANAR}

ways = pytest.mark.parametrize("find", WAYS.values(), ids=WAYS)
planar = pytest.mark.parametrize("layout", PLANAR)
seeds = st.integers(0, 2**31)


def moment_of(seed, width=C):
    rows = torch.randn(4 * width, width, generator=torch.Generator().manual_seed(seed))
    return rows.mT @ rows / len(rows)


def heads_of(seed, members=M):
    return torch.randn(members, E, C, generator=torch.Generator().manual_seed(seed))


def rotation(layout, angles):
    """E x E: pair i of a layout by angle i, as `Rotary` turns it; None is any orthogonal turn."""
    if layout is None:
        return torch.linalg.qr(
            torch.randn(E, E, generator=torch.Generator().manual_seed(int(angles[0] * 1e4)))
        )[0]
    turn = torch.zeros(E, E)
    for pair, angle in enumerate(angles):
        at = [pair, pair + E // 2] if layout == "half-split" else [2 * pair, 2 * pair + 1]
        c, s = angle.cos(), angle.sin()
        turn[torch.tensor(at)[:, None], torch.tensor(at)] = torch.stack(
            [torch.stack([c, -s]), torch.stack([s, c])]
        )
    return turn


@ways
@settings(max_examples=10)
@given(seeds)
def test_turns_are_orthogonal_and_are_what_was_done(find, seed):
    heads, moment = heads_of(seed), moment_of(seed + 1)
    turned, turns, _ = find(heads, moment)
    torch.testing.assert_close(turns @ turns.mT, torch.eye(E).expand(M, E, E))
    torch.testing.assert_close(turned, turns @ heads)
    torch.testing.assert_close(energy(turned, moment).sum(1), energy(heads, moment).sum(1))


@planar
@settings(max_examples=10)
@given(seeds, st.integers(0, 1000))
def test_planar_turns_commute_with_rotation(layout, seed, position):
    _, turns, _ = PLANAR[layout](heads_of(seed), moment_of(seed))
    rotary = Rotary(RopeConfig(layout=layout), E)

    def check(turns):
        x = torch.randn(1, 1, M, E)
        at = torch.tensor([[position + 1]])
        turn_first = rotary(torch.einsum("mef,blmf->blme", turns, x), at)
        turn_last = torch.einsum("mef,blmf->blme", turns, rotary(x, at))
        torch.testing.assert_close(turn_first, turn_last)

    check(turns)
    other = "interleaved" if layout == "half-split" else "half-split"
    for mutant in (procrustes, PLANAR[other]):
        with pytest.raises(AssertionError):
            check(mutant(heads_of(seed), moment_of(seed))[1])


@planar
def test_only_what_rotates_is_turned_in_pairs(layout):
    """Partial rope: the turns commute with it, and copies turned so are one head again."""
    rotary = Rotary(RopeConfig(layout=layout, partial_rotary_factor=4 / (E + 3)), E + 3)
    base, moment = torch.randn(1, E + 3, C), moment_of(0)
    planted, x = [], torch.randn(1, 7, M, E + 3)
    for _ in range(M):
        angle, free = 6.28 * torch.rand(2), torch.linalg.qr(torch.randn(E - 1, E - 1))[0]
        pairs = torch.block_diag(*(torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]]) for a in angle))
        order = [0, 2, 1, 3] if layout == "half-split" else [0, 1, 2, 3]
        planted.append(torch.block_diag(pairs[order][:, order], free))
    turned, turns, one = in_parts(PLANAR[layout], 4, torch.stack(planted) @ base, moment)
    torch.testing.assert_close(turned, turns @ torch.stack(planted) @ base)
    torch.testing.assert_close(turned, one.expand(M, E + 3, C))

    def check(turns):
        first, last = (torch.einsum("mef,blmf->blme", turns, one) for one in (x, rotary(x)))
        torch.testing.assert_close(rotary(first), last)

    check(turns)
    with pytest.raises(AssertionError):
        check(procrustes(torch.randn(M, E + 3, C), moment)[1])


@pytest.mark.parametrize("layout", [None, *PLANAR])
@settings(max_examples=10)
@given(seed=seeds)
def test_planted_turns_are_found(layout, seed):
    """Copies of one head, each turned in its own way, are one head again."""
    find, generator = WAYS[layout or "procrustes"], torch.Generator().manual_seed(seed)
    base, moment = heads_of(seed, 1)[0], moment_of(seed)
    planted = [rotation(layout, 6.28 * torch.rand(E // 2, generator=generator)) for _ in range(M)]
    turned, _, one = find(torch.stack(planted) @ base, moment)
    torch.testing.assert_close(turned, one.expand(M, E, C))
    assert energy(turned - one, moment).sum() < 1e-20 * energy(turned, moment).sum()
    mean = (torch.stack(planted) @ base).mean(0)
    assert energy(mean, moment).sum() < 0.999 * energy(base, moment).sum()  # what the plain mean loses


@planar
def test_planar_turns_do_not_find_what_is_no_angle(layout):
    """They are fewer: any orthogonal turn is not among them."""
    heads = torch.stack([rotation(None, torch.rand(1)) for _ in range(M)]) @ heads_of(5, 1)
    turned, _, _ = PLANAR[layout](heads, moment_of(6))
    assert energy(turned - turned.mean(0), moment_of(6)).sum() > 0.01


@ways
@settings(max_examples=10)
@given(seeds)
def test_the_norm_is_restored(find, seed):
    """The head that stands for a group has the energy its members have on average, pair by pair if rotated."""
    heads, moment = heads_of(seed), moment_of(seed + 1)
    turned, _, one = find(heads, moment)

    def per(rows):
        found = energy(rows, moment)
        if find is procrustes:
            return found.sum(-1)
        pairs = (2, -1) if find is planar_half_split else (-1, 2)
        return found.unflatten(-1, pairs).sum(-2 if find is planar_half_split else -1)

    torch.testing.assert_close(per(one), per(turned).mean(0))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(per(turned.mean(0)), per(turned).mean(0))


@ways
def test_aligned_heads_are_closer(find):
    """Seeds of twenty groups: the spread about the mean never grows, and shrinks in sum."""
    before = after = 0.0
    for seed in range(20):
        heads, moment = heads_of(seed), moment_of(seed + 1)
        turned, _, _ = find(heads, moment)
        spread = [float(energy(some - some.mean(0), moment).sum()) for some in (heads, turned)]
        assert spread[1] <= spread[0]
        before, after = before + spread[0], after + spread[1]
    assert after < 0.9 * before


@ways
def test_nothing_better_in_the_neighbourhood(find):
    """Each turn is the best for the mean it was fitted to: small further turns only spread the heads."""
    heads, moment = heads_of(3), moment_of(4)
    turned, _, _ = find(heads, moment)
    mean = turned.mean(0)
    best = energy(turned - mean, moment).sum()
    for seed in range(20):
        torch.manual_seed(seed)
        if find is procrustes:
            skew = torch.randn(M, E, E)
            more = torch.linalg.matrix_exp(0.01 * (skew - skew.mT))
        else:
            layout = next(name for name in PLANAR if PLANAR[name] is find)
            more = torch.stack([rotation(layout, 0.03 * torch.randn(E // 2)) for _ in range(M)])
        assert energy(more @ turned - mean, moment).sum() > best * (1 - 1e-7)


@ways
def test_no_heads_at_all_are_no_nan(find):
    """Heads of zeros, one or all, and a moment of zeros."""
    heads = heads_of(0)
    heads[1] = 0
    for case, moment in ((heads, moment_of(0)), (0 * heads, moment_of(0)), (heads, torch.zeros(C, C))):
        assert all(part.isfinite().all() for part in find(case, moment))


@ways
def test_a_group_of_one_stays(find):
    heads = heads_of(2, 1)
    turned, turns, one = find(heads, moment_of(2))
    torch.testing.assert_close(turned, heads)
    torch.testing.assert_close(turns, torch.eye(E)[None])
    torch.testing.assert_close(one, heads[0])


GQA = GroupedConfig(n_query_head=4, n_kv_head=2, head_dim=E, v_head_dim=5, qkv_bias=True)


@pytest.mark.parametrize("layout", [None, *PLANAR])
def test_aligning_alone_changes_no_output(layout):
    """Keys with the queries that read them, values with the output columns that read them."""
    rope = None if layout is None else RopeConfig(layout=layout)
    module, D = replace(GQA, rope=rope).build(C).requires_grad_(False), C
    x = torch.randn(7, 8, D)
    before = module(x)
    state = {name: weight.clone() for name, weight in module.state_dict().items()}
    moment = moment_of(9, C + 1)

    def rows(name):
        both = torch.cat([state[f"{name}.weight"], state[f"{name}.bias"][:, None]], 1)
        return both.unflatten(0, (2, -1))

    def check(find, queries=True, output=True, bias=True):
        made = dict(state)
        for name, way in (("k_proj", find), ("v_proj", procrustes)):
            turned, turns, _ = way(rows(name), moment)
            made[f"{name}.weight"], made[f"{name}.bias"] = (
                turned[..., :-1].flatten(0, 1),
                turned[..., -1].flatten(),
            )
            each = turns.repeat_interleave(2, 0)  # per query head
            if name == "k_proj" and queries:
                for part in ("weight", "bias") if bias else ("weight",):
                    heads = state[f"q_proj.{part}"].unflatten(0, (4, -1))
                    made[f"q_proj.{part}"] = torch.einsum("hef,hf...->he...", each, heads).flatten(0, 1)
            if name == "v_proj" and output:
                columns = state["o_proj.weight"].unflatten(1, (4, -1))
                made["o_proj.weight"] = torch.einsum("hef,dhf->dhe", each, columns).flatten(1)
        module.load_state_dict(made)
        torch.testing.assert_close(module(x), before)

    find = WAYS[layout or "procrustes"]
    check(find)
    for mutant in ({"queries": False}, {"output": False}, {"bias": False}):
        with pytest.raises(AssertionError):
            check(find, **mutant)
    if layout is not None:
        with pytest.raises(AssertionError):
            check(procrustes)  # any turn does not commute with the rotation
