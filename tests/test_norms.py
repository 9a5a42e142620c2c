"""Bounds of spectral norms, against numpy: dense SVD of the materialised maps, and FFT of the kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from opteq import operators as op
from opteq.operators.spectral import bound as sweep
from opteq.operators.spectral import branch_and_bound as supremum
from opteq.operators.spectral import norms
from opteq.operators.spectral.bound import bounded, eigenvalue_bound, squared_supremum
from opteq.operators.spectral.branch_and_bound import Autocorrelation
from opteq.operators.spectral.norms import kernel_norm, module_norm
from oracles import assert_slopes

quick = settings(deadline=None, max_examples=25, derandomize=True)
OVERSHOOT = 1.001


def symbol_norm(kernel: Tensor, points: int = 64) -> float:
    """The largest norm of the symbol on a grid, by numpy: a lower bound of the supremum."""
    grid = [1 if k == 1 else points for k in kernel.shape[2:]]
    spectrum = np.fft.fft2(kernel.detach().double().numpy(), s=grid, axes=(2, 3))
    matrices = np.moveaxis(spectrum, (0, 1), (2, 3)).reshape(-1, *kernel.shape[:2])
    return float(np.linalg.norm(matrices, 2, axis=(1, 2)).max())


def matrix_norm(linear: Callable[[Tensor], Tensor], *shape: int) -> float:
    """The largest singular value of the map on inputs of ``shape``, by dense SVD of its matrix."""
    basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    with torch.no_grad():
        return float(np.linalg.norm(linear(basis).flatten(1).numpy(), 2))


def acting(A: op.Conv2d | op.SeparableConv2d | op.Dense) -> op.LinearMap:
    """The prepared map with the weights that act, in float64 for measuring."""
    linear = A.prepare()
    for name, value in vars(linear).items():
        if isinstance(value, Tensor):
            setattr(linear, name, value.detach().double())
    return linear


# ---------------------------------------------------------------- eigenvalues


def real_form(A: np.ndarray) -> Tensor:
    return torch.from_numpy(A.real + A.imag)


def spectrum_matrix(eigenvalues: np.ndarray, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    n = len(eigenvalues)
    Q, _ = np.linalg.qr(rng.standard_normal((n, n)) + 1j * rng.standard_normal((n, n)))
    return (Q * eigenvalues) @ Q.conj().T


WORST_64 = np.r_[np.full(16, 0.1138), np.full(42, 0.4599), np.full(6, 1.0)]
SPECTRA = {
    "equal": np.ones(64),
    "projection": np.r_[np.ones(16), np.zeros(48)],
    "uniform": np.linspace(0, 1, 64),
    "near the worst found": WORST_64,
    "one above many": np.r_[1, np.full(63, 0.9)],
    "rank one": np.r_[1, np.zeros(63)],
    "scalar": np.ones(1),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize(("squarings", "excess"), [(3, 0.024), (4, 0.008), (7, 0.0005)])
def test_eigenvalue_bound_is_safe_and_as_tight_as_documented(name: str, squarings: int, excess: float) -> None:
    for scale in (1.0, 1e-12, 1e12):
        form = real_form(scale * spectrum_matrix(SPECTRA[name]))[None]
        norm = math.sqrt(eigenvalue_bound(form, squarings).item() / scale)
        assert 1 - 1e-9 <= norm <= 1 + excess
        norm32 = math.sqrt(eigenvalue_bound(form.float(), squarings).item() / scale)
        assert 1 - 2e-5 <= norm32 <= 1 + excess + 2e-4


@quick
@given(n=st.integers(1, 12), m=st.integers(1, 12), squarings=st.integers(1, 7), seed=st.integers(0, 10**6))
def test_eigenvalue_bound_of_random_matrices(n: int, m: int, squarings: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    K = rng.standard_normal((n, m)) + 1j * rng.standard_normal((n, m))
    A = K @ K.conj().T
    top = np.linalg.eigvalsh(A)[-1]
    bound = eigenvalue_bound(real_form(A)[None], squarings).item()
    assert top * (1 - 1e-9) <= bound <= top * n ** (2 / 2 ** (squarings + 2)) * (1 + 1e-6)
    symmetric = torch.from_numpy(A.real @ A.real)[None]
    one, two = (eigenvalue_bound(symmetric, squarings, symmetric=flag) for flag in (False, True))
    torch.testing.assert_close(one, two, rtol=1e-9, atol=0)


def test_eigenvalue_bound_of_zero() -> None:
    form = torch.zeros(2, 3, 3, requires_grad=True)
    bound = eigenvalue_bound(form, 4)
    assert (bound < 1e-15).all()
    bound.sum().backward()
    assert form.grad is not None
    assert form.grad.isfinite().all()


# ---------------------------------------------------------------- kernels


@quick
@given(
    k1=st.integers(1, 4), k2=st.integers(2, 4), groups=st.integers(1, 3), n=st.integers(1, 4), m=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_autocorrelation_gives_the_gram_matrices(k1: int, k2: int, groups: int, n: int, m: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    taps, frequencies = rng.standard_normal((k1, k2, groups, n, m)), rng.uniform(-4, 4, (3, 2))
    steps = np.stack(np.meshgrid(range(k1), range(k2), indexing="ij"), axis=-1)
    symbols = np.einsum("fij,ijgnm->fgnm", np.exp(1j * steps @ frequencies.T).transpose(2, 0, 1).conj(), taps)
    expected = symbols @ symbols.conj().transpose(0, 1, 3, 2)
    gram = Autocorrelation(torch.from_numpy(taps).flatten(0, 1), (k1, k2))
    waves = gram.waves(torch.from_numpy(frequencies))
    S, T = gram.at(waves)
    np.testing.assert_allclose((S + 1j * T).reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)


def wide_kernels() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    low = torch.einsum("mc,i,j->mcij", torch.randn(18, 16, generator=generator), *torch.ones(2, 3))
    return {"random": torch.randn(18, 16, 3, 3, generator=generator), "low frequencies": low}


@pytest.mark.parametrize("name", wide_kernels())
def test_bounds_of_wide_kernels_lie_above_and_are_close(name: str) -> None:
    kernel = wide_kernels()[name]
    reference = symbol_norm(kernel, 24)
    assert reference <= kernel_norm(kernel) <= reference * 1.055
    assert reference <= kernel_norm(kernel, fine=True) <= reference * 1.0035 / math.cos(math.pi / 24) ** 2


@pytest.mark.parametrize("missed", [1.0, 0.98, 0.0])
@pytest.mark.parametrize("name", ["random", "random thin", "shift", "stripes", "mixed"])
def test_close_norm_is_safe_where_the_peak_is_missed(name: str, missed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = supremum._largest_at
    monkeypatch.setattr(supremum, "_largest_at", lambda *a: missed * largest(*a))
    kernel = KERNELS[name].double()
    reference = symbol_norm(kernel, 128)
    assert reference * (1 - 1e-9) <= kernel_norm(kernel, fine=True) <= reference * 1.0035


def test_close_norm_agrees_with_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [
        torch.randn(6, 4, *size, generator=torch.Generator().manual_seed(0)) for size in [(2, 3), (1, 4), (5, 3)]
    ]
    close = [kernel_norm(kernel, groups=2, fine=True) for kernel in kernels]
    monkeypatch.setattr(norms, "close_supremum", lambda taps, size: squared_supremum(taps, size, fine=True))
    sweep = [kernel_norm(kernel, groups=2, fine=True) for kernel in kernels]
    torch.testing.assert_close(close, sweep, rtol=0.005, atol=0)


def test_fine_norm_of_what_cannot_be_searched() -> None:
    kernel = torch.randn(
        3, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    assert torch.autograd.gradcheck(lambda k: kernel_norm(k, fine=True), kernel)
    assert kernel_norm(torch.full((2, 2, 3, 3), math.nan), fine=True).isnan()
    many = torch.func.vmap(lambda k: kernel_norm(k, fine=True))(kernel.detach()[None])
    torch.testing.assert_close(many[0], kernel_norm(kernel.detach(), fine=True), rtol=0.005, atol=0)


@quick
@given(
    m=st.integers(1, 6), c=st.integers(1, 6), k1=st.integers(1, 5), k2=st.integers(1, 5), seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_kernel_norm_against_fft(m: int, c: int, k1: int, k2: int, seed: int, dtype: torch.dtype) -> None:
    kernel = torch.randn(m, c, k1, k2, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    reference = symbol_norm(kernel, 96)
    gap = 1 / math.cos(math.pi * max(k1, k2) / 2 / 96) ** 2  # of numpy's own grid
    assert reference <= kernel_norm(kernel) <= reference * gap * 1.055
    assert reference <= kernel_norm(kernel, fine=True) <= reference * gap * 1.005


def test_supremum_between_grid_points_is_covered() -> None:
    # The symbol cos(theta_1 - p) cos(theta_2 - p), made real with 2 x 2 rotations, is the worst case of the theory: its
    # maximum 1 lies in the middle of four points of the training grid, where it has only cos(pi / 16)^2.
    p = math.pi / 16
    kernel = torch.zeros(2, 2, 3, 3, dtype=torch.float64)
    for i in (-1, 1):
        for j in (-1, 1):
            a = (i + j) * p
            rotation = np.array([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
            kernel[:, :, 1 + i, 1 + j] = torch.from_numpy(rotation) / 4
    assert symbol_norm(kernel, 32) == pytest.approx(1)
    assert symbol_norm(kernel, 16) == pytest.approx(math.cos(p) ** 2)
    assert 1 <= kernel_norm(kernel) <= 1.0001  # the grid's maximum alone would be 4 % too small


def test_wide_kernels() -> None:
    kernel = torch.randn(130, 130, 1, 3, generator=torch.Generator().manual_seed(0))
    reference = symbol_norm(kernel, 48)
    assert reference <= kernel_norm(kernel) <= reference * 1.05


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (40, 25), (25, 40)])
def test_matrix_norm(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = float(np.linalg.norm(matrix.double().numpy(), 2))
    assert exact <= kernel_norm(matrix) <= exact * 1.002


# ---------------------------------------------------------------- the bound holds

ROTATION = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(3)))[0]
DELTA = torch.zeros(3, 3).index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(1.0))
KERNELS = {
    "random": torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(0)),
    "random thin": torch.randn(4, 2, 5, 1, generator=torch.Generator().manual_seed(1)),
    "constant": torch.full((4, 4, 3, 3), 0.7),
    "alternating": torch.tensor([[1.0, -1, 1], [-1, 1, -1], [1, -1, 1]]).expand(4, 3, 3, 3).clone(),
    "stripes": torch.tensor([1.0, -1, 1]).expand(3, 4, 3, 3).clone(),
    "rank one": torch.einsum("m,c,i,j->mcij", *torch.randn(4, 3, generator=torch.Generator().manual_seed(2))),
    "delta": 5 * torch.eye(4)[:, :, None, None] * DELTA,
    "shift": 5 * torch.eye(4)[:, :, None, None] * DELTA.roll(1, 0),
    "rotation": 5 * ROTATION[:, :, None, None] * DELTA,
    "1 x 1": torch.randn(4, 3, 1, 1, generator=torch.Generator().manual_seed(4)),
    "huge": 1e20 * torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(5)),
    "tiny": 1e-20 * torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(6)),
    "mixed": torch.logspace(-20, 20, 36).reshape(2, 2, 3, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_convolution_stays_within_its_bound(name: str, dtype: torch.dtype) -> None:
    kernel = KERNELS[name].to(dtype)
    m, c, k1, k2 = kernel.shape
    bound = 1e-22 if name == "tiny" else 0.9
    A = op.Conv2d(c, m, (k1, k2), bound=bound).to(dtype)
    A.load_state_dict({"weight": kernel})
    found = []
    for mode in (True, False):
        linear = acting(A.train(mode))
        found += [matrix_norm(linear, c, h, w) / bound for h, w in ((1, 1), (2, 5), (6, 4))]
    assert max(found) <= OVERSHOOT
    unit = linear.weight / bound
    assert 0.93 <= symbol_norm(unit) <= OVERSHOOT
    assert symbol_norm(unit) * (1 - 1e-6) <= A.norm() / bound <= min(1.0, symbol_norm(unit) * 1.005) * (1 + 1e-6)


@pytest.mark.parametrize(
    "matrix",
    [
        torch.randn(6, 9, generator=torch.Generator().manual_seed(0)),
        torch.ones(9, 6),
        5 * ROTATION,
        torch.outer(torch.arange(5.0), torch.arange(7.0)),
        1e20 * torch.randn(5, 5, generator=torch.Generator().manual_seed(1)),
        torch.tensor([[4.0]]),
    ],
    ids=["random", "constant", "rotation", "rank one", "huge", "scalar"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrix_stays_within_its_bound(matrix: Tensor, dtype: torch.dtype) -> None:
    A = op.Dense(matrix.shape[1], matrix.shape[0], bound=0.9).to(dtype)
    A.load_state_dict({"weight": matrix})
    exact = matrix_norm(acting(A), matrix.shape[1]) / 0.9
    assert 0.998 <= exact <= OVERSHOOT
    assert exact * (1 - 1e-6) <= A.norm() / 0.9 <= 1 + 1e-6


@pytest.mark.parametrize(("depthwise", "pointwise"), [(1.0, 1.0), (1e20, 1.0), (1e15, 1e15), (1e-25, 1e30)])
def test_separable_stays_within_its_bound(depthwise: float, pointwise: float) -> None:
    A = op.SeparableConv2d(3, 4, 3, bound=0.9)
    with torch.no_grad():
        A.depthwise.normal_().mul_(depthwise)
        A.pointwise.normal_().mul_(pointwise)
    linear = acting(A)
    assert matrix_norm(linear, 3, 6, 5) <= 0.9 * OVERSHOOT
    composed = linear.pointwise * linear.depthwise.transpose(0, 1)
    assert 0.945 * 0.9 <= symbol_norm(composed) <= 0.9 * OVERSHOOT
    assert symbol_norm(composed) <= A.norm() <= 0.9 * 1.0001


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e10, 1e30])
def test_norms_of_weights_of_any_size(size: float) -> None:
    """Squares of the weights would overflow or vanish, or products of weights that balance each other."""
    A = op.SeparableConv2d(2, 2, 3)
    with torch.no_grad():
        A.depthwise.zero_()
        A.depthwise[:, 0, 1, 1] = torch.tensor([size, 1])
        A.pointwise[:] = torch.tensor([1 / size, 1])[:, None, None]
    assert 2 <= A.norm() <= 2.01
    both = op.Stack([op.Dense(2, 2), op.Dense(2, 2)])
    for part in both.parts():
        part.load_state_dict({"weight": size * torch.eye(2)})
    assert math.sqrt(2) <= both.norm() / size <= 1.42
    assert op.Downsample(2, torch.full((2, 2), size)).norm() / size == pytest.approx(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_of_downsampling_in_low_precision(dtype: torch.dtype) -> None:
    A = op.Downsample(4, torch.linspace(0.1, 1, 16).reshape(4, 4)).to(dtype)
    assert A.norm() == pytest.approx(float(torch.linalg.vector_norm(A.kernel.double())), rel=1e-6)


@pytest.mark.parametrize("make", [lambda: op.Dense(4, 6, 0.9), lambda: op.Conv2d(2, 3, 3, 0.9)])
def test_bound_survives_an_absurd_step(make: Callable[[], op.Dense | op.Conv2d]) -> None:
    A = make()
    shape = (4,) if isinstance(A, op.Dense) else (2, 5, 5)
    optimiser = torch.optim.SGD(A.parameters(), lr=1e3)
    for _ in range(3):
        assert matrix_norm(acting(A), *shape) <= 0.9 * OVERSHOOT
        optimiser.zero_grad()
        A(torch.randn(3, *shape)).square().sum().backward()
        optimiser.step()
    assert A.weight.abs().max() > 10
    assert matrix_norm(acting(A), *shape) <= 0.9 * OVERSHOOT


def test_bound_is_approached_by_large_pictures() -> None:
    A = op.Conv2d(1, 1, 3, bound=0.9)
    with torch.no_grad():
        A.weight.fill_(1)
    small, large = (matrix_norm(acting(A), 1, side, side) for side in (2, 24))
    assert small < 0.5
    assert 0.85 < large < 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bound_in_low_precision(dtype: torch.dtype) -> None:
    A = op.Conv2d(4, 4, 3, bound=0.9).to(dtype)
    with torch.no_grad():
        A.weight.mul_(100)
    assert A.prepare().weight.dtype == dtype
    assert 0.93 * 0.9 <= symbol_norm(A.prepare().weight) <= 0.9 * OVERSHOOT
    assert A.norm().dtype == torch.float32
    for bound in np.linspace(0.5, 1.0, 37):  # some of them lie just below a number that the format can hold
        constant = op.Dense(4, 4, bound=float(bound)).to(dtype)
        nn.init.constant_(constant.weight, 7)
        assert 0.98 * bound <= matrix_norm(acting(constant), 4) <= bound * OVERSHOOT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_in_one_direction_stays_within_the_bound(dtype: torch.dtype) -> None:
    """Where all entries of a matrix of signs are rounded up, the norm grows sqrt(n) times as much as they do."""
    signs = torch.ones(1, 1)
    for _ in range(3):
        signs = torch.kron(signs, 1 - 2 * torch.eye(4))
    eps = torch.finfo(dtype).eps
    for place, gap, bound in itertools.product(range(0, 90, 9), (0, 1, 2), (0.63, 0.9, 1.0)):
        weight = torch.where(signs > 0, 1 + place * eps, -1 - (place + gap) * eps).to(dtype)
        A = op.Dense(64, 64, bound=bound).to(dtype)
        A.load_state_dict({"weight": weight})
        exact = matrix_norm(acting(A), 64)
        assert 0.93 * bound <= exact <= bound * OVERSHOOT
        kernel = op.Conv2d(64, 64, 1, bound=bound).to(dtype)
        kernel.load_state_dict({"weight": weight[:, :, None, None]})
        assert torch.equal(acting(kernel).weight[:, :, 0, 0], acting(A).weight)


def test_autocast_does_not_touch_the_bound() -> None:
    A = op.Conv2d(4, 4, 3, bound=0.9)
    with torch.no_grad():
        A.weight.mul_(100)
    plain = A.prepare().weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(A.prepare().weight, plain)
        assert A(torch.randn(1, 4, 5, 5)).dtype == torch.bfloat16
        assert A.norm() == A.norm()


def test_gradient_mode_does_not_change_the_weight() -> None:
    A = op.Conv2d(3, 4, 3, bound=0.1)
    with torch.no_grad():
        without = A.prepare().weight
    torch.testing.assert_close(A.prepare().weight, without, rtol=1e-6, atol=0)


def test_unbounded_weight_is_used_as_it_is() -> None:
    for A in (op.Dense(3, 4), op.Conv2d(3, 4, 3)):
        assert A.prepare().weight is A.weight


def test_stack_norm() -> None:
    A = op.Stack([op.Conv2d(2, 3, 3), op.Conv2d(2, 2, 1, bound=0.5)]).double()
    exact = matrix_norm(A, 2, 6, 6)
    assert exact <= A.norm() <= math.sqrt(0.9**2 + 0.5**2) * 1.001
    twice = op.Stack([A.operators[0], A.operators[0]])
    torch.testing.assert_close(twice.norm(), math.sqrt(2) * A.operators[0].norm())


# ---------------------------------------------------------------- gradients


def weight_like(*shape: int, scale: float) -> Tensor:
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (scale * weight).requires_grad_()


@pytest.mark.parametrize("shape", [(4, 5), (3, 2, 3, 3), (2, 3, 1, 3), (3, 2, 1, 1)])
@pytest.mark.parametrize("scale", [3.0, 1e8])
def test_gradient_through_the_bound(shape: tuple[int, ...], scale: float) -> None:
    # Scaled by a constant inside, so that gradcheck's steps of 1e-6 fit weights of any size.
    weight = weight_like(*shape, scale=1.0)
    assert bounded(scale * weight, 0.5).abs().max() < 0.5 * (scale * weight).abs().max()
    assert torch.autograd.gradcheck(lambda w: bounded(scale * w, 0.5), weight, rtol=1e-5)


def test_gradient_of_a_single_channel() -> None:
    """A Gram matrix of one entry has no variance, whose root has no derivative."""
    kernel = weight_like(4, 1, 3, 3, scale=1.0).detach().abs().requires_grad_()  # largest at the frequency zero
    (slope,) = torch.autograd.grad(kernel_norm(kernel), kernel)
    (expected,) = torch.autograd.grad(kernel.sum(dim=(1, 2, 3)).norm() / math.cos(math.pi / 16) ** 2, kernel)
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=0)


def test_sweep_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = weight_like(4, 2, 3, 3, scale=1.0)
    before = kernel_norm(kernel, groups=2)
    monkeypatch.setattr(sweep, "_CHUNK_CPU", 1)
    torch.testing.assert_close(kernel_norm(kernel, groups=2), before, rtol=1e-12, atol=0)


def test_second_gradient_through_the_bound() -> None:
    assert torch.autograd.gradgradcheck(lambda w: bounded(w, 0.5), weight_like(2, 2, 1, 3, scale=3.0))


def test_gradient_of_the_separable_bound() -> None:
    def product(depthwise: Tensor, pointwise: Tensor) -> Tensor:
        return bounded(pointwise, 0.5, depthwise.transpose(0, 1)) * depthwise.transpose(0, 1)

    inputs = (weight_like(3, 1, 3, 3, scale=2.0), weight_like(4, 3, 1, 1, scale=2.0))
    assert torch.autograd.gradcheck(product, inputs)


def test_gradient_through_the_modules() -> None:
    A, v = op.Conv2d(2, 3, 3, bound=0.5).double(), torch.randn(1, 2, 3, 4, dtype=torch.float64)
    weight = weight_like(3, 2, 3, 3, scale=3.0)
    assert torch.autograd.gradcheck(lambda w: torch.func.functional_call(A, {"weight": w}, (v,)), weight)


@pytest.mark.parametrize("shape", [(4, 5), (3, 2, 3, 3)])
@pytest.mark.parametrize("scale", [1e-3, 1e-30, 0.0])
def test_weight_below_the_bound_passes_unchanged(shape: tuple[int, ...], scale: float) -> None:
    weight = weight_like(*shape, scale=scale).detach().float().requires_grad_()
    result = bounded(weight, 0.5)
    assert torch.equal(result, weight)
    result.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_zero_weight() -> None:
    for A in (op.Dense(3, 4, 0.5), op.Conv2d(3, 4, 3, 0.5), op.SeparableConv2d(3, 4, 3, 0.5)):
        for parameter in A.parameters():
            nn.init.zeros_(parameter)
        v = torch.ones(1, 3) if isinstance(A, op.Dense) else torch.ones(1, 3, 4, 4)
        out = A(v)
        assert not out.any()
        out.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in A.parameters())
        assert A.norm() < 1e-15


def test_half_zero_separable_weight() -> None:
    A = op.SeparableConv2d(3, 4, 3, 0.5)
    nn.init.zeros_(A.depthwise)
    A(torch.ones(1, 3, 4, 4)).sum().backward()
    assert A.depthwise.grad is not None
    assert A.depthwise.grad.isfinite().all()


def test_training_moves_the_weight_under_the_bound() -> None:
    """The bound is no wall for the gradient: fitting a rotation of norm 1 with bound 1 from a weight far above."""
    target = ROTATION.double()
    A = op.Dense(4, 4, bound=1.0).double()
    optimiser = torch.optim.Adam(A.parameters(), lr=0.05)
    for _ in range(300):
        optimiser.zero_grad()
        (A.prepare().weight - target).square().sum().backward()
        optimiser.step()
    assert (A.prepare().weight - target).abs().max() < 0.01


# ---------------------------------------------------------------- modules


class Halved(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


CONVOLUTIONS = [
    nn.Conv2d(3, 4, 3),
    nn.Conv2d(3, 4, 3, padding=1),
    nn.Conv2d(3, 4, 3, padding=5),
    nn.Conv2d(3, 4, 3, stride=2, padding=1),
    nn.Conv2d(4, 6, 3, padding="same", groups=2),
    nn.Conv2d(4, 4, 3, padding=1, groups=4),
    nn.Conv2d(2, 3, 2, padding=1),
    nn.Conv2d(2, 3, (4, 3), dilation=(1, 2), padding=2),
    nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"),
    nn.Conv2d(3, 2, 3, dilation=2, padding=2, padding_mode="circular"),
    nn.Conv2d(3, 2, 3, padding="same", padding_mode="circular"),
    nn.Conv2d(3, 2, 1),
]


@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_norm_of_torch_convolutions(conv: nn.Conv2d) -> None:
    conv = conv.double()
    norm = module_norm(conv)
    assert norm is not None
    assert not norm.requires_grad
    bias, conv.bias = conv.bias, None
    exact = matrix_norm(conv, conv.in_channels, 9, 8)
    conv.bias = bias
    assert exact <= norm
    if conv.stride == (1, 1):
        assert norm <= 1.35 * exact  # a 9 x 8 picture comes within that of the supremum


def test_norm_of_grouped_convolution_is_the_largest_group() -> None:
    conv = nn.Conv2d(4, 6, 3, groups=2)
    parts = [symbol_norm(part) for part in conv.weight.chunk(2)]
    norm = module_norm(conv)
    assert norm is not None
    assert max(parts) <= norm <= 1.005 * max(parts)


def test_norm_of_other_modules() -> None:
    linear = nn.Linear(5, 7)
    exact = float(np.linalg.norm(linear.weight.detach().double().numpy(), 2))
    norm = module_norm(linear)
    assert norm is not None
    assert exact <= norm <= 1.002 * exact
    assert module_norm(nn.Identity()) == 1
    chain = module_norm(nn.Sequential(linear, nn.Identity(), op.Dense(7, 2, bound=0.5)))
    assert chain is not None
    torch.testing.assert_close(chain, 0.98 * 0.5 * norm, rtol=2e-3, atol=0)  # operators begin just within their bound
    parametrised = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    norm = module_norm(parametrised)
    assert norm is not None
    assert 1 - 1e-6 <= norm <= 1.002


@pytest.mark.parametrize(
    "module",
    [
        nn.ReLU(),
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(2, 2, 3, padding="same", padding_mode="replicate"),
        nn.Conv2d(2, 2, 1, padding=1, padding_mode="circular"),
        nn.Conv1d(2, 2, 3),
        Halved(2, 2),
    ],
    ids=str,
)
def test_unknown_norms(module: nn.Module) -> None:
    assert module_norm(module) is None


def test_circular_padding_that_enlarges_would_break_the_bound() -> None:
    # Why such padding is unknown to module_norm: a 1 x 1 identity with wrapped borders repeats pixels.
    conv = nn.Conv2d(1, 1, 1, padding=1, padding_mode="circular", bias=False).double()
    nn.init.ones_(conv.weight)
    assert matrix_norm(conv, 1, 3, 3) > 1.5


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_bound_on_a_gpu_without_waiting_for_it(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        for kernel in (KERNELS["random"], KERNELS["constant"], torch.randn(96, 160, 3, 3)):
            A = op.Conv2d(kernel.shape[1], kernel.shape[0], 3, bound=0.9).cuda()
            A.load_state_dict({"weight": kernel})
            A.prepare().weight.sum().backward()  # the table of frequencies travels to the device once
            torch.cuda.set_sync_debug_mode("error")
            weight = A.prepare().weight
            weight.sum().backward()
            torch.cuda.set_sync_debug_mode("default")
            assert 0.945 * 0.9 <= symbol_norm(weight.cpu(), 32) <= 0.9 * OVERSHOOT
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("seed", range(2))
def test_fresh_operators_have_a_derivative(seed: int) -> None:
    """Weights begin within the bound, not at its kink."""
    torch.manual_seed(seed)
    for operator, v in [
        (op.Dense(4, 5, bound=0.9), torch.randn(2, 4, dtype=torch.float64)),
        (op.Conv2d(2, 3, 3, bound=0.9), torch.randn(1, 2, 4, 4, dtype=torch.float64)),
        (op.SeparableConv2d(2, 3, 3, bound=0.9), torch.randn(1, 2, 4, 4, dtype=torch.float64)),
    ]:
        operator = operator.double()
        operator.reset_parameters()  # in float64, whose certified norm takes no margin for float32
        names = [name for name, _ in operator.named_parameters()]

        def product(*values: torch.Tensor, operator=operator, names=names, v=v) -> torch.Tensor:
            return torch.func.functional_call(operator, dict(zip(names, values, strict=True)), (v,))

        assert_slopes(product, list(operator.parameters()))
