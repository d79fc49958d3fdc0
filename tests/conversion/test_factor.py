"""A matrix as a thin product: the best there is, for what it counts as error."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rehead.conversion import Factors, factor
from rehead.errors import ConfigError, NumericError

N, C = 7, 11

seeds, ranks = st.integers(0, 2**31), st.integers(1, N)


def draws(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def problem(seed, weighted=(True, True)):
    weight, x, g = draws(seed, (N, C), (40, C), (30, N))
    x, g = x * torch.linspace(0.1, 3, C), g * torch.linspace(3, 0.1, N)
    moments = (x.mT @ x / len(x), g.mT @ g / len(g))
    return weight, *(moment if wanted else None for moment, wanted in zip(moments, weighted, strict=True))


def cost(difference, inputs, outputs):
    """tr(P (W - W') C (W - W')^T)."""
    inputs = torch.eye(C) if inputs is None else inputs
    outputs = torch.eye(N) if outputs is None else outputs
    return torch.trace(outputs @ difference @ inputs @ difference.mT).item()


WEIGHTED = {"svd": (False, False), "whitened": (True, False), "outputs": (False, True), "both": (True, True)}
weightings = pytest.mark.parametrize("weighted", WEIGHTED.values(), ids=WEIGHTED)


@weightings
@settings(max_examples=15)
@given(seed=seeds, rank=ranks)
def test_the_error_is_what_it_says(weighted, seed, rank):
    """Closed form: the energy of the directions cut off, by Eckart-Young, is the error there is."""
    weight, inputs, outputs = problem(seed, weighted)
    factors = factor(weight, rank, inputs, outputs)
    assert (factors.up.shape, factors.down.shape, factors.energy.shape) == ((N, rank), (rank, C), (N,))
    assert (factors.energy.diff() <= 0).all()
    left = cost(weight - factors.up @ factors.down, inputs, outputs)
    whole = cost(weight, inputs, outputs)
    assert left == pytest.approx(float(factors.energy[rank:].sum()), rel=1e-5, abs=1e-8 * whole)
    if rank < N:
        assert factors.lost == pytest.approx(left / whole, rel=1e-5)


@weightings
@settings(max_examples=10)
@given(seed=seeds, rank=st.integers(1, N - 1))
def test_no_change_of_it_is_better(weighted, seed, rank):
    """In random directions, near and far."""
    weight, inputs, outputs = problem(seed, weighted)
    factors = factor(weight, rank, inputs, outputs)
    best = cost(weight - factors.up @ factors.down, inputs, outputs)
    for step in (1e-3, 0.1, 1.0):
        for up, down in (draws(seed + k, (N, rank), (rank, C)) for k in range(5)):
            other = (factors.up + step * up) @ (factors.down + step * down)
            assert cost(weight - other, inputs, outputs) > best * (1 - 1e-7)


@pytest.mark.parametrize("other", ["svd", "whitened", "outputs"])
def test_each_is_best_for_its_own_error(other):
    """Less weighting is worse by the full measure: the moments are used, and each in its place."""
    weight, inputs, outputs = problem(0)
    best = factor(weight, 3, inputs, outputs)
    less = factor(weight, 3, *problem(0, WEIGHTED[other])[1:])
    costs = [cost(weight - one.up @ one.down, inputs, outputs) for one in (best, less)]
    assert costs[1] > 1.01 * costs[0]


@settings(max_examples=15)
@given(seeds, ranks)
def test_without_moments_it_is_the_svd(seed, rank):
    (weight,) = draws(seed, (N, C))
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    expected = left[:, :rank] * values[:rank] @ right[:rank]
    factors = factor(weight, rank)
    torch.testing.assert_close(factors.up @ factors.down, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(factors.energy, values.square(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(N, C), (C, N), (5, 5), (1, 4), (4, 1)])
@pytest.mark.parametrize("moments", ["none", "full", "singular", "zero"])
def test_exact_at_full_rank_whatever_the_moments(shape, moments):
    """A text too short to show all directions costs nothing where nothing has to go."""
    weight, x, g = draws(1, shape, (2, shape[1]), (2, shape[0]))
    made = [rows.mT @ rows for rows in (x, g)]
    if moments == "full":
        made = [moment + torch.eye(len(moment)) for moment in made]
    if moments == "zero":
        made = [0 * moment for moment in made]
    found = factor(weight, min(shape), *([] if moments == "none" else made))
    torch.testing.assert_close(found.up @ found.down, weight, rtol=1e-13, atol=1e-13)
    assert found.lost == 0


@settings(max_examples=15)
@given(seeds, st.integers(1, N - 1))
def test_exact_on_what_a_short_text_shows(seed, rank):
    """Inputs of few directions: a product of as small a rank answers as the matrix does."""
    weight, x = draws(seed, (N, C), (rank, C))
    found = factor(weight, rank, x.mT @ x)
    answers = x @ weight.mT
    torch.testing.assert_close(x @ (found.up @ found.down).mT, answers, rtol=1e-4, atol=1e-6)
    assert found.up.isfinite().all()
    assert found.lost < 1e-7


def test_singular_outputs_do_not_blow_up():
    """Outputs that never matter: the ridge keeps the solution of moderate size."""
    weight, inputs, _ = problem(2)
    outputs = torch.diag(torch.tensor([1.0, 1, 1, 1, 0, 0, 0]))
    found = factor(weight, 4, inputs, outputs)
    product = found.up @ found.down
    assert product.isfinite().all()
    torch.testing.assert_close(product[:4], weight[:4], rtol=1e-5, atol=1e-5)
    assert product.norm() < 100 * weight.norm()


AGREE = {np.float32: 2**-22, np.float64: 1e-12}
"""Of the largest number: both compute in float64, where memory lies otherwise in another order, and then round."""


@weightings
@pytest.mark.parametrize("dtype", AGREE)
def test_numpy_and_torch_agree(weighted, dtype):
    given = [None if part is None else part.numpy().astype(dtype) for part in problem(3, weighted)]
    weight, inputs, outputs = given
    arrays = factor(weight, 3, inputs, outputs=outputs)
    weight, inputs, outputs = (None if part is None else torch.from_numpy(part) for part in given)
    tensors = factor(weight, 3, inputs, outputs)
    assert isinstance(arrays, Factors)
    assert isinstance(arrays.energy, np.ndarray)
    assert arrays.up.dtype == arrays.down.dtype == dtype

    def check(found):
        for array, tensor, off in zip(found, tensors, [AGREE[dtype]] * 2 + [1e-12], strict=True):
            assert isinstance(array, np.ndarray)
            np.testing.assert_allclose(array, tensor.numpy(), rtol=0, atol=off * tensor.abs().max().item())
        assert found.lost == pytest.approx(tensors.lost, rel=1e-11, abs=0)

    check(arrays)
    few = 1 + 8 * AGREE[dtype]
    energy = arrays.energy * np.where(np.arange(N) < 3, 1, 1 + 1e-9)  # of what is cut off alone
    for broken in (
        arrays._replace(up=arrays.up * few),
        arrays._replace(down=arrays.down * few),
        arrays._replace(energy=energy),
    ):
        with pytest.raises(AssertionError):
            check(broken)


def test_the_arguments_are_left_alone():
    parts = problem(4)
    before = [part.clone() for part in parts]
    factor(parts[0], 3, *parts[1:])
    assert all(torch.equal(part, was) for part, was in zip(parts, before, strict=True))


VIEWS = {
    "transposed": lambda array: array.T,
    "flipped": lambda array: array[::-1],
    "every other": lambda array: array[:, ::2],
    "read-only": lambda array: (array.setflags(write=False), array)[1],
    "Fortran order": np.asfortranarray,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_any_numpy_array_of_floats_will_do(view):
    array = view(np.random.default_rng(0).standard_normal((N, C)))
    up, down, _ = factor(array, min(array.shape))
    np.testing.assert_allclose(up @ down, array, rtol=1e-12, atol=1e-12)


def test_whole_numbers_are_no_reason_to_round():
    """E6 is written in them: either refused, or factored as the floats they stand for."""
    try:
        up, down, _ = factor(np.array([[1, 2, 3], [2, 4, 7]]), 2)
    except (TypeError, ConfigError):
        return
    np.testing.assert_allclose(up @ down, [[1, 2, 3], [2, 4, 7]])


@pytest.mark.parametrize("rank", [0, -1, N + 1, 100])
@pytest.mark.parametrize("shape", [(N, C), (C, N)])
def test_a_rank_that_is_none(rank, shape):
    with pytest.raises(ConfigError) as caught:
        factor(torch.randn(shape), rank)
    assert f"rank={rank} of a matrix {shape}: use 1 to {N}" in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("rank", [3, N])
def test_a_matrix_that_is_not_finite(bad, rank):
    weight = torch.randn(N, C)
    weight[2, 5] = bad
    with pytest.raises(NumericError, match=rf"a matrix \({N}, {C}\) holds NaN or infinity"):
        factor(weight, rank)
    with pytest.raises(NumericError, match="holds NaN or infinity"):
        factor(weight.numpy(), rank)


@pytest.mark.parametrize("which", ["inputs", "outputs"])
def test_a_moment_that_is_not_finite(which):
    weight, inputs, outputs = problem(5)
    moments = {"inputs": inputs, "outputs": outputs}
    moments[which][1, 1] = float("nan")
    with pytest.raises(NumericError, match="calibration text gave activations that are not finite"):
        factor(weight, 3, **moments)


def test_zeros_have_factors():
    found = factor(torch.zeros(N, C), 2)
    assert not (found.up @ found.down).any()
    assert found.lost == 0


@weightings
@pytest.mark.parametrize("rank", [2, N])
def test_rows_of_zeros_stay_zeros(weighted, rank):
    """With nothing of what a solver leaves: no format that scales by row would hold that."""
    weight, inputs, outputs = problem(3, weighted)
    weight[[1, 4]] = 0
    weight[2] = weight[0] * 2.0**-40  # small, but not nothing
    up = factor(weight, rank, inputs, outputs).up
    assert (up == 0).all(dim=1).nonzero().flatten().tolist() == [1, 4]
