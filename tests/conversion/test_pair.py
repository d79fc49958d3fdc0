"""The likeliest Kronecker pair, by its likelihood in NumPy; and why inputs and gradients are not taken apart."""

import numpy as np
import pytest
import torch

from rehead.conversion import factor
from rehead.conversion.fit.pair import SHRINKAGE, TOGETHER, Kept, kronecker_pair
from rehead.errors import ResourceError

C, M = 5, 4


@pytest.fixture
def kept(tmp_path):
    """Tokens on disk, added in two parts."""

    def make(x, g, dtype=torch.float64):
        kept = Kept(tmp_path / f"kept-{len(list(tmp_path.iterdir()))}")
        for rows in (slice(None, 7), slice(7, None)):
            kept.add(torch.from_numpy(x[rows]).to(dtype), torch.from_numpy(g[rows]).to(dtype))
        return kept

    return make


def tokens(n=60, seed=0):
    """Ordinary ones and, every tenth, a sink: inputs and gradients of their own, in directions of their own."""
    random = np.random.default_rng(seed)
    x, g = random.standard_normal((n, C)), random.standard_normal((n, M))
    x[:, 0] *= 0.1
    x[::10] = 0.1 * x[::10] + 30 * np.eye(C)[0]
    g[::10] = 0.01 * g[::10] + 3 * np.eye(M)[0]
    g[1::2, 0] *= 0.1
    return x, g


def unlikeliness(x, g, inputs, outputs):
    """-2 log likelihood of the g x^T under a matrix normal distribution, per token, at the best scale."""
    size = np.einsum("ti,ij,tj->t", x, np.linalg.inv(inputs), x) * np.einsum(
        "ti,ij,tj->t", g, np.linalg.inv(outputs), g
    )
    logs = M * np.linalg.slogdet(inputs)[1] + C * np.linalg.slogdet(outputs)[1]
    return logs + C * M * np.log(size.mean() / (C * M))


def fitted(kept, rounds=60):
    return [part.numpy() for part in kronecker_pair(kept, rounds=rounds, shrinkage=0.0)]


@pytest.mark.parametrize("seed", range(4))
def test_the_likeliest(seed, kept):
    """No other pair is likelier, near or far; four rounds are nearly there; it is the fixed point."""
    x, g = tokens(seed=seed)
    pair = fitted(kept(x, g))
    best, random = unlikeliness(x, g, *pair), np.random.default_rng(seed)
    for _ in range(20):
        near = []
        for part in pair:
            root = np.eye(len(part)) + 0.01 * random.standard_normal(part.shape)
            near.append(root @ part @ root.T)
        assert unlikeliness(x, g, *near) > best
    apart = x.T @ x / len(x), g.T @ g / len(g)
    assert unlikeliness(x, g, *apart) > best + 0.1
    assert unlikeliness(x, g, *fitted(kept(x, np.roll(g, 1, axis=0)))) != pytest.approx(
        unlikeliness(x, g, *pair)
    )
    assert unlikeliness(x, g, *fitted(kept(x, g), rounds=4)) - best < 0.05
    weight = np.einsum("ti,ij,tj->t", g, np.linalg.inv(pair[1]), g)
    again = (weight[:, None] * x).T @ x
    np.testing.assert_allclose(again / np.linalg.norm(again), pair[0], atol=1e-6)
    assert all(np.linalg.eigvalsh(part).min() > 0 for part in pair)


def test_no_direction_counts_for_nothing(kept):
    """Of three tokens too: a share of the mean variance is added in every direction."""
    x, g = tokens()
    for part in (*kronecker_pair(kept(x[:8], g[:8])), *kronecker_pair(kept(x, g))):
        least = torch.linalg.eigvalsh(part).min()
        assert least >= 0.999 * SHRINKAGE / (1 + SHRINKAGE) * part.diagonal().mean()


def with_a_sink(seed, n=600, c=12, m=9):
    """Every twentieth token has nearly the same input, large, and gradients that are small."""
    random = np.random.default_rng(seed)
    x, g = (
        random.standard_normal((n, width))
        @ (random.standard_normal((width, width)) * np.linspace(1.5, 0.1, width)).T
        for width in (c, m)
    )
    x[::20] = 10 * random.standard_normal(c) + 0.5 * random.standard_normal((n // 20, c))
    g[::20] *= 0.03
    return x, g, torch.from_numpy(random.standard_normal((m, c)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rank", [1, 2])
def test_with_a_sink_apart_is_wrong(rank, seed, kept):
    """What an error of the weights does to the loss, E[(g^T E x)^2] over the tokens: the pair keeps more."""
    x, g, weight = with_a_sink(seed)
    cost = []
    for inputs, outputs in (kronecker_pair(kept(x, g)), map(torch.from_numpy, (x.T @ x, g.T @ g))):
        up, down, _ = factor(weight, rank, inputs, outputs)
        error = x @ (weight - up @ down).numpy().T
        cost.append(np.square((g * error).sum(axis=1)).mean())
    assert cost[0] < 0.95 * cost[1]


def test_without_a_sink_there_is_little_between_them(kept):
    random = np.random.default_rng(1)
    x = random.standard_normal((4000, C)) * np.linspace(0.2, 2, C)
    g = random.standard_normal((4000, M)) * np.linspace(2, 0.2, M)
    for pair, apart in zip(kronecker_pair(kept(x, g), shrinkage=0.0), (x, g), strict=True):
        moment = apart.T @ apart
        np.testing.assert_allclose(pair.numpy(), moment / np.linalg.norm(moment), atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_kept_as_the_model_computed_it(dtype, kept):
    """In order, to the bit, in parts; what it takes on disk."""
    random = np.random.default_rng(0)
    x, g = random.standard_normal((TOGETHER + 9, C)), random.standard_normal((TOGETHER + 9, M))
    found = kept(x, g, dtype)
    parts = list(found)
    assert [len(x) for x, _ in parts] == [TOGETHER, 9]
    for one, other in zip((x, g), zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(other), torch.from_numpy(one).to(dtype).to(parts[0][0].dtype))
    assert found.file.stat().st_size == len(x) * (C + M) * dtype.itemsize
    exact = kronecker_pair(kept(x, g))
    for one, other in zip(kronecker_pair(found), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_whatever_the_size(scale, kept):
    """Gradients are small, sinks large; of a product only the shape counts."""
    x, g = tokens()
    for one, other in zip(
        kronecker_pair(kept(scale * x, g / scale, torch.float32)), kronecker_pair(kept(x, g)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_text_that_moves_nothing(kept):
    """Then all directions count alike."""
    for pair, width in zip(kronecker_pair(kept(*(0 * part for part in tokens()))), (C, M), strict=True):
        torch.testing.assert_close(pair, (1 + SHRINKAGE) * torch.eye(width, dtype=torch.float64))


def test_a_disk_that_is_full(monkeypatch, kept):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.open", full)
    with pytest.raises(ResourceError, match=r"cannot keep the text's activations.*free some space"):
        kept(*tokens())
