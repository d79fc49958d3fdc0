"""A rank for each layer: the best there is within a budget, and as measured."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rehead.attention import GroupedConfig, LatentConfig
from rehead.conversion.blocks import blocks_of
from rehead.conversion.converter import Converter
from rehead.conversion.ranks import PROBE_TOKENS, Allocation
from rehead.conversion.target import Target
from rehead.conversion.texts import Passage
from rehead.errors import ConfigError
from rehead.measure.fidelity import Comparison, compare

GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5)
LATENT = LatentConfig(
    n_query_head=6, n_kv_head=2, kv_lora_rank=18, qk_nope_head_dim=4, v_head_dim=5, latent_norm=False
)


class Table(Allocation):
    """Damages that are given, not measured, and a loss that is their sum."""

    def __init__(self, ranks, damages, source=GQA):
        self.grids = [[replace(LATENT, kv_lora_rank=rank) for rank in row] for row in ranks]
        self.damages = damages
        self.config = Model((source,) * len(ranks))
        self.tried = []

    def _measure(self, targets):
        self.tried.append(targets)
        loss = 2.0 + sum(
            damages[grid.index(latent)]
            for grid, damages, latent in zip(self.grids, self.damages, targets, strict=True)
        )
        return Comparison(
            max_error=0.0,
            relative_error=0.0,
            kl=0.0,
            argmax_flips=0.0,
            losses=(2.0, loss),
            change_error=0.0,
            tokens=1,
        )


class Model:
    def __init__(self, attention):
        self.attention = attention


def cost(latents):
    return sum(latent.kv_numbers() for latent in latents)


def damage(table, latents):
    pairs = zip(table.grids, table.damages, latents, strict=True)
    return sum(damages[grid.index(latent)] for grid, damages, latent in pairs)


def test_ranks_that_nothing_is_fitted_to_say_how_much_was_read(gpt, words):
    text = Passage(name="text", ids=words(300))
    converter = Converter(gpt(GQA), "svd", [text], length=16)
    _, certificate = converter.convert([replace(LATENT, kv_lora_rank=7)] * 2, ranked_on=64)
    assert [one.read for one in certificate.calibration] == [64]
    with pytest.warns(UserWarning, match="ranks that were chosen are exact: teach=2 has nothing to learn"):
        _, certificate = converter.convert([LATENT] * 2, ranked_on=64, teach=2)
    assert certificate.teach == 0


grids = st.lists(st.sets(st.integers(1, 18), min_size=1, max_size=4).map(sorted), min_size=1, max_size=4)


@settings(max_examples=60)
@given(grids, st.floats(0.01, 1), st.randoms(use_true_random=False))
def test_as_good_as_all_tried(ranks, fraction, random):
    """Brute force over every choice; damages need not even fall with the rank."""
    table = Table(ranks, [[random.random() for _ in row] for row in ranks])
    budget = fraction * 18 * len(ranks)
    allowed = [choice for choice in product(*table.grids) if cost(choice) <= budget]
    if not allowed:
        least = sum(row[0] for row in ranks)
        with pytest.raises(
            ConfigError, match=rf"kv_fraction={fraction} leaves .* numbers, {least} are the least"
        ):
            table.within(fraction)
        return
    found = table.within(fraction)
    assert cost(found) <= budget
    assert damage(table, found) == pytest.approx(min(damage(table, choice) for choice in allowed))


@settings(max_examples=30)
@given(grids, st.randoms(use_true_random=False))
def test_more_budget_is_never_worse(ranks, random):
    table = Table(ranks, [[random.random() for _ in row] for row in ranks])
    least = sum(row[0] for row in ranks) / (18 * len(ranks))
    found = [damage(table, table.within(min(1.0, least + step / 10))) for step in range(1, 11)]
    assert found == sorted(found, reverse=True)


def falling(ranks, full, scale):
    """Damages as a spectrum has them: 0 at the full rank."""
    return [[scale * (1 - rank / full) ** 2 for rank in row] for row in ranks]


@pytest.mark.parametrize("full", [12, 18, 23, 48, 100])
@pytest.mark.parametrize("max_loss", [0.0, 0.02, 0.1, 0.5])
def test_at_a_loss_the_smallest_there_is(full, max_loss):
    """Within one step of the grid of the cheapest choice that keeps the loss."""
    ranks = [sorted({max(1, full * step // 12) for step in range(1, 13)})] * 2
    table = Table(ranks, [falling(ranks, full, scale)[0] for scale in (1.0, 0.3)])
    found = table.at_loss(max_loss)
    assert damage(table, found) <= max_loss
    best = min(cost(choice) for choice in product(*table.grids) if damage(table, choice) <= max_loss)
    assert cost(found) <= best + 2 * (full / 12 + 1)
    assert len(table.tried) <= 8  # by halving


def test_more_loss_is_never_more_cache():
    ranks = [list(range(2, 25, 2))] * 3
    table = Table(ranks, [falling(ranks, 24, scale)[0] for scale in (1.0, 0.3, 0.1)])
    costs = [cost(table.at_loss(max_loss)) for max_loss in (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 5.0)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == 3 * 24
    assert costs[-1] == 3 * 2


@pytest.fixture
def allocation(gpt, words):
    """Of a model whose first layer has little to lose."""
    model = gpt(GQA, n_step=20, std=0.2)
    attention = model.layers[0].self_attn
    stack = torch.randn(18, 3) @ torch.randn(3, 23)
    attention.k_proj.weight.data, attention.v_proj.weight.data = stack[:8].clone(), stack[8:].clone()
    return Allocation(Converter(model, calibration=[Passage(name="words", ids=words(200))]), Target(to="mla"))


def measured(allocation, words, targets):
    """The losses of source and result, on the text the ranks were measured on."""
    model = allocation.converter.model
    result, _ = allocation.converter.follow(targets)
    return compare(model, result, blocks_of(model, words(200), PROBE_TOKENS)).losses


def test_measured(allocation, words):
    """Damages, a budget kept, a loss kept; the poor layer gives up its rank first."""
    full = [grid[-1] for grid in allocation.grids]
    assert full == [LATENT, LATENT]
    for grid, damages in zip(allocation.grids, allocation.damages, strict=True):
        assert damages[-1] < 1e-12  # exact
        assert damages[0] > damages[-1]
        targets = [grid[0], LATENT] if damages is allocation.damages[0] else [LATENT, grid[0]]
        result, _ = allocation.converter.follow(targets)
        model = allocation.converter.model
        kl = compare(model, result, blocks_of(model, words(200), PROBE_TOKENS)).kl
        assert damages[0] == pytest.approx(kl, rel=1e-6, abs=1e-12)
    found = allocation.within(0.5)
    assert cost(found) <= 18
    assert found[0].kv_lora_rank < found[1].kv_lora_rank
    for max_loss in (0.0, 0.01, 0.1):
        found = allocation.at_loss(max_loss)
        before, after = measured(allocation, words, found)
        assert after - before <= max_loss + 1e-12


@pytest.mark.parametrize(("name", "n_token"), [("self", 180), ("words", 192)])
def test_a_loss_is_measured_on_what_the_certificate_counts(name, n_token, gpt, words):
    """The token after a window of a sampled text does not follow from it."""
    converter = Converter(gpt(GQA), calibration=[Passage(name=name, ids=words(193))])
    (targets,) = [targets for _, targets in Allocation(converter, Target(to="mla")).probe]
    assert int((targets != -100).sum()) == n_token


@pytest.mark.parametrize("loss", [-0.1, float("nan")])
def test_a_loss_that_is_none(loss):
    with pytest.raises(ConfigError, match=f"max_loss={loss}: nats per token above .*Use 0 or more"):
        Table([[1, 2]], [[0.1, 0.0]]).at_loss(loss)
