"""Logits to probabilities to tokens."""

from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rehead.errors import NumericError, UsageError
from rehead.sampling import draw, probabilities, require_valid

V = 11
LOGITS = torch.tensor([[0.3, 2.0, -1.0, 1.5, 0.0, -4.0, 0.9, 0.31, -0.2, 1.1, -2.5]])
ORDER = LOGITS[0].argsort(descending=True).tolist()
some_logits = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20).map(
    lambda row: torch.tensor([row])
)


def support(likely):
    return sorted(likely[0].nonzero().flatten().tolist())


@pytest.mark.parametrize("temperature", [0.2, 1, 1.7])
def test_plain_is_softmax_at_a_temperature(temperature):
    torch.testing.assert_close(
        probabilities(LOGITS, temperature),
        (LOGITS.double() / temperature).softmax(-1).float(),
        rtol=1e-6,
        atol=1e-7,
    )


@pytest.mark.parametrize("k", range(1, V))
def test_top_k_keeps_the_k_likeliest_in_proportion(k):
    likely = probabilities(LOGITS, 0.7, top_k=k)
    assert support(likely) == sorted(ORDER[:k])
    plain = probabilities(LOGITS, 0.7)
    torch.testing.assert_close(likely[0, ORDER[:k]], plain[0, ORDER[:k]] / plain[0, ORDER[:k]].sum())


@given(some_logits, st.integers(1, 20))
def test_top_k_keeps_k_tokens_also_of_equals(logits, k):
    assert len(support(probabilities(logits.round(), 50.0, top_k=k))) == min(k, logits.shape[-1])


@pytest.mark.parametrize("k", [V, V + 1, 10**9])
def test_top_k_of_the_whole_vocabulary_is_plain_sampling(k):
    assert torch.equal(probabilities(LOGITS, 0.7, top_k=k), probabilities(LOGITS, 0.7))


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.3, 0.5, 0.77, 0.9, 0.99, 0.9999])
def test_top_p_keeps_the_fewest_that_hold_p(p):
    likely, plain = probabilities(LOGITS, top_p=p), probabilities(LOGITS)
    held = plain[0, ORDER].double().cumsum(0)
    n = int((held < p).sum()) + 1
    assert support(likely) == sorted(ORDER[:n])
    torch.testing.assert_close(likely[0, ORDER[:n]], plain[0, ORDER[:n]] / plain[0, ORDER[:n]].sum())


def test_top_p_at_the_edge_takes_no_more_than_it_needs():
    halves = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).log()
    assert support(probabilities(halves, top_p=0.5)) == [1]
    assert support(probabilities(halves, top_p=0.75)) == [0, 1]
    assert support(probabilities(halves, top_p=0.76)) in ([0, 1, 2], [0, 1, 3])


def test_top_p_of_one_is_plain_sampling():
    assert torch.equal(probabilities(LOGITS, 0.7, top_p=1), probabilities(LOGITS, 0.7))


def test_top_p_acts_within_top_k():
    """Of the three kept, renormalised, the first alone holds 0.45."""
    assert support(probabilities(LOGITS, top_k=3, top_p=0.45)) == ORDER[:1]
    assert support(probabilities(LOGITS, top_p=0.45)) == sorted(ORDER[:2])


def test_rows_do_not_mix():
    logits = torch.randn(5, V)
    settings = {"temperature": 0.8, "top_k": 6, "top_p": 0.8}
    alone = torch.cat([probabilities(row[None], **settings) for row in logits])
    assert torch.equal(probabilities(logits, **settings), alone)


def test_temperature_0_is_the_likeliest_token():
    logits = torch.randn(20, V)
    likely = probabilities(logits, 0, top_k=3, top_p=0.5)
    assert torch.equal(likely, torch.nn.functional.one_hot(logits.argmax(-1), V).float())
    assert torch.equal(draw(likely, torch.rand(20)), logits.argmax(-1))


@given(some_logits, st.floats(1e-310, 1e300))
def test_any_temperature_gives_a_distribution(logits, temperature):
    likely = probabilities(logits, temperature)
    assert (likely >= 0).all()
    assert abs(likely.double().sum() - 1) < 1e-6


def test_cold_is_greedy_and_hot_is_uniform():
    assert support(probabilities(LOGITS, 1e-45)) == ORDER[:1]
    torch.testing.assert_close(probabilities(LOGITS, 1e30), torch.full((1, V), 1 / V, dtype=torch.float32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_numbers_that_are_not_finite_are_refused(bad, temperature):
    logits = torch.randn(3, V)
    logits[1, 4] = bad
    with pytest.raises(NumericError, match=r"not finite: its weights are damaged, or it has diverged"):
        probabilities(logits, temperature)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision_of_logits(dtype):
    logits = LOGITS.to(dtype)
    torch.testing.assert_close(probabilities(logits), probabilities(logits.float()))


REFUSED = [  # temperature, top_k, top_p, what the message must name, the remedy it must offer
    (-0.5, None, None, "temperature=-0.5", "0 (always the likeliest token)"),
    (float("nan"), None, None, "temperature=nan", "0 (always the likeliest token)"),
    (float("inf"), None, None, "temperature=inf", "0 (always the likeliest token)"),
    (1.0, 0, None, "top_k=0", "1 or more"),
    (1.0, -3, None, "top_k=-3", "1 or more"),
    (1.0, None, 0.0, "top_p=0.0", "more than 0, at most 1"),
    (1.0, None, 1.5, "top_p=1.5", "more than 0, at most 1"),
    (1.0, None, float("nan"), "top_p=nan", "more than 0, at most 1"),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "named", "remedy"), REFUSED)
def test_refused_settings(temperature, top_k, top_p, named, remedy):
    with pytest.raises(UsageError) as caught:
        require_valid(temperature, top_k, top_p)
    assert named in str(caught.value)
    assert remedy in str(caught.value)


def check_frequencies(settings, draw=draw):
    """Pearson's chi-square of 50,000 draws stays below its 1 - 1e-4 quantile (Wilson-Hilferty)."""
    likely, n = probabilities(LOGITS, **settings), 50_000
    noise = torch.rand(n, generator=torch.Generator().manual_seed(5))
    count = torch.bincount(draw(likely.expand(n, -1), noise), minlength=V)
    kept = likely[0] > 0
    assert count[~kept].sum() == 0
    expected = likely[0, kept].double() * n
    free = int(kept.sum()) - 1
    quantile = free * (1 - 2 / (9 * free) + NormalDist().inv_cdf(1 - 1e-4) * (2 / (9 * free)) ** 0.5) ** 3
    assert ((count[kept] - expected) ** 2 / expected).sum() < quantile


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.5}, {"temperature": 1.5}, {"top_k": 4}, {"top_k": 7, "top_p": 0.9}]
)
def test_50_000_draws_fit(settings):
    check_frequencies(settings)
    for mutant in (
        lambda likely, noise: draw(likely, noise**1.1),
        lambda likely, noise: (draw(likely, noise) + (noise < 0.02)) % V,
        lambda likely, noise: draw(likely.roll(1, 0).sqrt(), noise),
    ):
        with pytest.raises(AssertionError):
            check_frequencies(settings, mutant)


def test_draws_never_take_an_impossible_token():
    likely = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    edges = torch.tensor([0.0, 0.5, 0.49999999, 1 - 2**-24])
    assert draw(likely.expand(4, -1), edges).tolist() == [1, 3, 1, 3]


@pytest.mark.parametrize("top_p", [1e-45, 1e-46, 5e-324])
def test_the_smallest_top_p_keeps_the_likeliest_token(top_p):
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert probabilities(logits, 1.0, top_p=top_p).tolist() == [[0, 1, 0]]
