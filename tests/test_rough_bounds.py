"""The sweep over frequencies that ends early, against LAPACK and the sweep over all of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opteq.operators import symbol
from opteq.operators.correlation import Autocorrelation
from opteq.operators.norms import kernel_norm

quick = settings(deadline=None, max_examples=40, derandomize=True)
# What the slack of a norm leaves to rounding, for its square.
SLACK = 1 + 2**-10


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kernels(n: int, m: int) -> dict[str, Tensor]:
    centre = torch.zeros(3, 3)
    centre[1, 1] = 1.0
    ones, signs = torch.ones(3, 3), torch.tensor([[1.0, -1, 1], [-1, 1, -1], [1, -1, 1]])
    edges = torch.tensor([[0.0, -1, 0], [-1, 4, -1], [0, -1, 0]])
    flat = torch.linalg.qr(normal(m, n))[0].mT.contiguous()
    return {
        "random": normal(n, m, 3, 3),
        "low frequencies": normal(n, m)[:, :, None, None] * ones + 0.05 * normal(n, m, 3, 3, seed=1),
        "high frequencies": normal(n, m)[:, :, None, None] * signs + 0.05 * normal(n, m, 3, 3, seed=1),
        "vanishing at zero": normal(n, m)[:, :, None, None] * edges,
        "few directions": torch.einsum("nr,rm,rij->nmij", normal(n, 3), normal(3, m), normal(3, 3, 3)),
        "one direction": torch.einsum("n,m,ij->nmij", normal(n), normal(m), ones) + 0.1 * normal(n, m, 3, 3, seed=1),
        "uneven channels": normal(n, m, 3, 3) * torch.logspace(0, -3, m)[:, None, None],
        "uneven and lopsided": normal(n, m, 3, 3) * torch.logspace(0, -3, n)[:, None, None, None] + 0.3 * centre,
        "delta": normal(n, m)[:, :, None, None] * centre,
        "orthogonal": flat[:, :, None, None] * centre,
        "shift": flat[:, :, None, None] * centre.roll((1, 1), (0, 1)),
    }


# At these all frequencies attain the maximum, so the frequency that rounding chooses is as good as any.
ANYWHERE = {"delta", "orthogonal", "shift"}


def taps_of(kernel: Tensor, groups: int = 1) -> Tensor:
    n, m = kernel.shape[:2]
    return kernel.reshape(groups, n // groups, m, -1).movedim(-1, 0).contiguous()


def rough_and_true(kernel: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    """Rough bounds, and the largest eigenvalues of the Gram matrices made from the taps in float64, ``(F, groups)``."""
    size = (kernel.shape[2], kernel.shape[3])
    taps, grid = taps_of(kernel, groups), symbol.half_grid(12, 12)
    gram = Autocorrelation(taps, size)
    rough = symbol._rough_bounds(gram, gram.waves(grid))
    places = torch.cartesian_prod(torch.arange(size[0]), torch.arange(size[1])).double()
    waves = torch.polar(torch.ones(()).double(), -(grid @ places.mT))
    symbols = torch.einsum("ft,tgnm->fgnm", waves, taps.to(waves.dtype))
    return rough, torch.linalg.matrix_norm(symbols, 2).square()


# ------------------------------------------------------------------------------------------------- rough bounds


@pytest.mark.parametrize("name", kernels(4, 4))
@pytest.mark.parametrize("shape", [(8, 8), (24, 30), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rough_bounds_are_above(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    kernel = kernels(*shape)[name].to(dtype)
    rough, true = rough_and_true(kernel / kernel.abs().max())
    # Where a symbol all but vanishes, rounding of the Gram matrix is all there is: nothing to certify.
    assert (rough * SLACK >= true - 1e-5 * true.max()).all()
    assert (rough <= true * (1 + math.sqrt(shape[0])) + 0.05 * true.max()).all()


@quick
@given(st.data())
def test_rough_bounds_are_above_whatever_the_kernel(data: st.DataObject) -> None:
    n, spread = data.draw(st.integers(1, 12)), data.draw(st.floats(0, 6))
    m, k1, k2 = n + data.draw(st.integers(0, 6)), data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    groups, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 2**30))
    kernel = normal(groups * n, m, k1, k2, seed=seed) * (spread * normal(groups * n, m, 1, 1, seed=seed + 1)).exp()
    rough, true = rough_and_true(kernel / kernel.abs().max(), groups)
    assert (rough * SLACK >= true - 1e-5 * true.max()).all()


def test_rough_bounds_are_exact_where_trace_and_norm_tell_all() -> None:
    rough, true = rough_and_true(kernels(16, 16)["orthogonal"].double())
    torch.testing.assert_close(rough, true, rtol=0.02, atol=0)
    one = torch.einsum("n,m,ij->nmij", normal(16), normal(16), normal(3, 3)).double()
    rough, true = rough_and_true(one)
    torch.testing.assert_close(rough, true, rtol=0.02, atol=0.02 * float(true.max()))


def test_rough_bounds_of_zero() -> None:
    assert not rough_and_true(torch.zeros(4, 4, 3, 3))[0].any()


# ------------------------------------------------------------------------------------------------- the sweep


def swept(kernel: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    kernel = kernel.detach().requires_grad_()
    value = kernel_norm(kernel, groups)
    return value.detach(), torch.autograd.grad(value, kernel)[0]


@pytest.mark.parametrize("name", kernels(4, 4))
def test_value_and_gradient_are_those_of_all_frequencies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernels(64, 80)[name]
    value, slope = swept(kernel)
    monkeypatch.setattr(symbol, "_ELIMINATION", math.inf)  # no frequency is left out
    expected, slope_expected = swept(kernel)
    # Equal eigenvalues leave a variance that is all rounding.
    torch.testing.assert_close(value, expected, rtol=5e-4 if name in ANYWHERE else 2e-6, atol=0)
    if name in ANYWHERE:  # norms are homogeneous
        torch.testing.assert_close((slope * kernel).sum(), value, rtol=2e-3, atol=0)
    else:
        torch.testing.assert_close(slope, slope_expected, rtol=1e-3, atol=1e-5 * float(slope_expected.abs().max()))


@pytest.mark.parametrize("n", [128, 256])
def test_wide_kernels_too(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A coarse grid: what is tested does not depend on it, and the sweep over all frequencies is slow.
    monkeypatch.setattr(symbol, "_TRAINING", ((math.inf, symbol._Effort(5, 3)),))
    kernel = kernels(n, n)["one direction"]
    value, slope = swept(kernel)
    monkeypatch.setattr(symbol, "_ELIMINATION", math.inf)  # no frequency is left out
    expected, slope_expected = swept(kernel)
    torch.testing.assert_close(value, expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(slope, slope_expected, rtol=1e-3, atol=1e-5 * float(slope_expected.abs().max()))


@pytest.mark.parametrize("loud", [0, 1])
def test_groups(loud: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = normal(2, 64, 64, 3, 3)
    kernel[loud] *= 1.2
    value, slope = swept(kernel.flatten(0, 1), groups=2)
    monkeypatch.setattr(symbol, "_ELIMINATION", math.inf)  # no frequency is left out
    expected, slope_expected = swept(kernel.flatten(0, 1), groups=2)
    torch.testing.assert_close(value, expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(slope, slope_expected, rtol=1e-3, atol=1e-5 * float(slope_expected.abs().max()))
    assert not slope.reshape(kernel.shape)[1 - loud].any()


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e8, 1e30])
def test_tiny_and_huge_kernels(scale: float) -> None:
    kernel = kernels(64, 64)["one direction"]
    torch.testing.assert_close(kernel_norm(kernel * scale), kernel_norm(kernel) * scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [(1, 2), (2, 1), (1, 5), (2, 2)])
def test_other_sizes(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = normal(66, 70, *size)
    value = kernel_norm(kernel)
    monkeypatch.setattr(symbol, "_ELIMINATION", math.inf)  # no frequency is left out
    torch.testing.assert_close(value, kernel_norm(kernel), rtol=2e-6, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["random", "one direction"])
def test_what_is_not_a_number_is_seen(name: str, value: float) -> None:
    kernel = kernels(64, 64)[name]
    kernel[5, 7, 1, 2] = value
    assert kernel_norm(kernel).isnan()
    with torch.no_grad():
        assert kernel_norm(kernel.reshape(2, 32, 64, 3, 3).repeat(1, 2, 1, 1, 1).flatten(0, 1), groups=2).isnan()


def formed(kernel: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """At how many frequencies Gram matrices are formed."""
    counts = []
    at = Autocorrelation.at
    monkeypatch.setattr(Autocorrelation, "at", lambda self, waves: (counts.append(len(waves[0])), at(self, waves))[1])
    kernel_norm(kernel)
    return sum(counts)


def test_few_matrices_are_formed_where_some_frequencies_stand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    number = len(symbol.half_grid(16, 16))
    assert formed(kernels(64, 64)["one direction"], monkeypatch) < number / 3
    monkeypatch.undo()
    assert formed(kernels(64, 64)["random"], monkeypatch) == number
