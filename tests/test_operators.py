"""Linear maps: exact adjoints, shapes, errors. Norms and bounds are tested in test_norms.py."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from opteq import operators as op

quick = settings(deadline=None, max_examples=25, derandomize=True)
small = st.integers(1, 5)
odd = st.sampled_from([1, 3, 5])
bounds = st.sampled_from([None, 0.5])


def double(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_adjoint(A: op.LinearMap | op.Operator, v: Tensor, u: Tensor) -> None:
    with torch.no_grad():
        image, back = A(v), A.adjoint(u)
    assert image.shape == u.shape
    assert back.shape == v.shape
    left, right = (image * u).sum(), (v * back).sum()
    scale = max(1.0, float(image.norm() * u.norm()))
    assert abs(left - right) <= 1e-12 * scale


# ---------------------------------------------------------------- adjoints


@quick
@given(m=small, n=small, lead=st.sampled_from([(), (0,), (1,), (3,), (2, 3)]), bound=bounds)
def test_dense_adjoint(m: int, n: int, lead: tuple[int, ...], bound: float | None) -> None:
    A = op.Dense(m, n, bound=bound).double()
    assert_adjoint(A, double(0, *lead, m), double(1, *lead, n))


@quick
@given(
    kind=st.sampled_from([op.Conv2d, op.SeparableConv2d]),
    c=small, m=small, k1=odd, k2=odd, batch=st.integers(0, 2), h=st.integers(1, 7), w=st.integers(1, 7), bound=bounds,
)  # fmt: skip
def test_convolution_adjoint(
    kind: type[op.Conv2d] | type[op.SeparableConv2d],
    c: int, m: int, k1: int, k2: int, batch: int, h: int, w: int, bound: float | None,
) -> None:  # fmt: skip
    A = kind(c, m, (k1, k2), bound=bound).double()
    assert_adjoint(A, double(0, batch, c, h, w), double(1, batch, m, h, w))


@quick
@given(factor=st.integers(1, 4), batch=st.integers(0, 2), c=small, h=st.integers(1, 4), w=st.integers(1, 4))
def test_pool_adjoint(factor: int, batch: int, c: int, h: int, w: int) -> None:
    A = op.Downsample(factor)
    assert_adjoint(A, double(0, batch, c, h * factor, w * factor), double(1, batch, c, h, w))


@quick
@given(
    split=small, patch=st.integers(1, 3), groups=st.integers(1, 3), rows=st.integers(1, 3), cols=st.integers(1, 3),
    batch=st.integers(0, 2),
)  # fmt: skip
def test_patches_are_orthogonal(split: int, patch: int, groups: int, rows: int, cols: int, batch: int) -> None:
    x = double(0, batch, split * groups, patch * rows, patch * cols)
    R = op.Patches(split, patch)
    u = double(1, batch, groups, rows, cols, split * patch**2)
    for A in (R, R.prepare()):
        assert_adjoint(A, x, u)
        assert torch.equal(A.adjoint(A(x)), x)  # the same numbers, not only close ones
        assert torch.equal(A(A.adjoint(u)), u)
    # The adjoint of the adjoint, by autograd, is the map again.
    (back,) = torch.autograd.grad(R.adjoint(u.requires_grad_()), u, x)
    assert torch.equal(back, R(x))


@pytest.mark.parametrize("kind", [op.Conv2d, op.SeparableConv2d])
def test_convolution_adjoint_is_the_vjp(kind: type[op.Conv2d] | type[op.SeparableConv2d]) -> None:
    A = kind(3, 4, (3, 5), bound=0.9).double()
    v, u = double(0, 2, 3, 5, 6).requires_grad_(), double(1, 2, 4, 5, 6)
    (vjp,) = torch.autograd.grad(A(v), v, u)
    torch.testing.assert_close(A.adjoint(u), vjp, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "A", [op.Stack([op.Dense(4, 2), op.Dense(4, 3, bound=0.5)]), op.Stack([op.Stack([op.Dense(4, 3)]), op.Dense(4, 2)])]
)
def test_stack_of_matrices(A: op.Stack) -> None:
    A = A.double()
    assert (A.in_features, A.out_features) == (4, 5)
    v = double(0, 3, 4)
    assert_adjoint(A, v, double(1, 3, 5))
    assert torch.equal(A(v), torch.cat([part(v) for part in A.parts()], dim=-1))


def test_stack_of_convolutions() -> None:
    A = op.Stack([op.Conv2d(2, 3, 3), op.SeparableConv2d(2, 1, 5), op.Conv2d(2, 2, 1)]).double()
    assert (A.in_channels, A.out_channels) == (2, 6)
    v = double(0, 2, 2, 4, 5)
    assert_adjoint(A, v, double(1, 2, 6, 4, 5))
    assert torch.equal(A(v)[:, :3], A.operators[0](v))


def test_identity() -> None:
    v = double(0, 2, 3)
    assert_adjoint(op.Identity(), v, double(1, 2, 3))
    assert op.Identity()(v) is v
    assert op.Identity().norm() == 1


# ---------------------------------------------------------------- what the maps compute


def test_dense_is_linear_layer() -> None:
    A, v = op.Dense(3, 4), torch.randn(2, 3)
    assert torch.equal(A(v), F.linear(v, A.weight))


def test_separable_is_the_composed_convolution() -> None:
    A, v = op.SeparableConv2d(3, 4, 3, bound=0.7).double(), double(0, 2, 3, 5, 5)
    with torch.no_grad():
        A.depthwise.mul_(5)
    linear = A.prepare()
    composed = linear.pointwise * linear.depthwise.transpose(0, 1)
    torch.testing.assert_close(linear(v), F.conv2d(v, composed, padding=1), rtol=1e-12, atol=1e-12)
    assert linear.depthwise is A.depthwise


def test_prepare_computes_the_weight_once_and_keeps_its_gradient() -> None:
    A = op.Conv2d(2, 3, 3, bound=0.5)
    linear = A.prepare()
    linear.adjoint(linear(torch.randn(1, 2, 4, 4))).sum().backward()
    assert A.weight.grad is not None
    assert A.weight.grad.isfinite().all()


def test_patches_order() -> None:
    # Written with plain loops: channel group, then row, then column; inside a patch channel, row, column.
    x = torch.arange(1.0 * 4 * 4 * 6).reshape(1, 4, 4, 6)
    expected = [
        x[0, 2 * g : 2 * g + 2, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].flatten()
        for g, i, j in itertools.product(range(2), range(2), range(3))
    ]
    patches = op.Patches(split=2, patch=2)
    assert patches(x).shape == (1, 2, 2, 3, 8)
    assert torch.equal(patches(x).flatten(1, 3)[0], torch.stack(expected))
    assert patches.prepare().grid(x.shape) == patches.prepare().grid((4, 4, 6)) == (2, 2, 3)
    assert repr(patches) == "Patches(split=2, patch=2)"


@quick
@given(split=st.integers(1, 3), patch=st.integers(1, 3), groups=st.integers(1, 2), rows=st.integers(1, 2))
def test_patches_norm_is_that_of_the_matrix(split: int, patch: int, groups: int, rows: int) -> None:
    R, shape = op.Patches(split, patch), (split * groups, patch * rows, patch)
    basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    singular = np.linalg.svd(R(basis).flatten(1).numpy(), compute_uv=False)
    np.testing.assert_allclose(singular, 1, rtol=1e-12)
    assert R.norm() == op.module_norm(R) == 1


@quick
@given(k=st.integers(1, 4), h=st.integers(1, 3), w=st.integers(1, 3))
def test_resample_up_is_the_adjoint_of_down(k: int, h: int, w: int) -> None:
    z, y = double(0, 2, 3, h * k, w * k), double(1, 2, 3, h, w)
    down, up = op.resample(z, (h, w)), op.resample(y, (h * k, w * k))
    torch.testing.assert_close((down * y).sum(), (z * up).sum(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(down, z.unflatten(3, (w, k)).unflatten(2, (h, k)).mean((3, 5)))
    torch.testing.assert_close(op.resample(up, (h, w)), y / k**2)  # P P' = 1 / k^2


def test_resample_same_size_is_the_same_tensor() -> None:
    z = torch.randn(1, 2, 4, 4)
    assert op.resample(z, 4) is z


def test_pool_norm_is_that_of_the_matrix() -> None:
    matrix = op.Downsample(3)(torch.eye(36).reshape(36, 1, 6, 6)).reshape(36, 4)
    assert np.linalg.norm(matrix.numpy(), 2) == pytest.approx(1 / 3)
    assert op.Downsample(3).norm().item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("make", [lambda b: op.Dense(20, 30, b), lambda b: op.Conv2d(4, 6, 3, b)])
@pytest.mark.parametrize("bound", [None, 0.5, 2.0])
def test_initial_norm(make: Callable[[float | None], op.Operator], bound: float | None) -> None:
    A = make(bound)
    target = 0.9 if bound is None else 0.98 * bound  # just within the bound, off its kink
    assert 0.95 * target <= A.norm() <= target * 1.001
    assert A.weight.std() > 0
    with torch.no_grad():
        prepared = A.prepare().weight  # what was scaled at construction is not scaled again
    torch.testing.assert_close(prepared, A.weight.detach(), rtol=1e-5, atol=0)


def test_initial_norm_of_the_separable_convolution() -> None:
    assert 0.95 * 0.9 <= op.SeparableConv2d(4, 6, 3).norm() <= 0.9 * 1.001


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    A = op.Conv2d(3, 4, 3, bound=0.9).to(dtype)
    z = torch.randn(2, 3, 5, 5, dtype=dtype)
    assert A.adjoint(A(z)).dtype == dtype
    assert op.resample(z, 1).dtype == dtype
    assert op.resample(z, 10).dtype == dtype


# ---------------------------------------------------------------- an ordinary module

MODULES = [
    op.Dense(3, 4, bound=0.5),
    op.Conv2d(3, 4, (1, 3), bound=0.5),
    op.SeparableConv2d(3, 4, 3, bound=0.5),
    op.Stack([op.Dense(3, 2, bound=0.5), op.Dense(3, 4)]),
    op.Patches(3, 2),
    op.Identity(),
]


def example(A: op.Operator) -> Tensor:
    return torch.randn(2, 3, 4, 4) if not (isinstance(A, op.Dense) or hasattr(A, "in_features")) else torch.randn(2, 3)


@pytest.mark.parametrize("A", MODULES, ids=lambda A: type(A).__name__)
def test_copies_agree(A: op.Operator) -> None:
    v = example(A)
    fresh = copy.deepcopy(A)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(1)
    fresh.load_state_dict(A.state_dict())
    for other in (copy.deepcopy(A), pickle.loads(pickle.dumps(A)), fresh):
        assert torch.equal(other(v), A(v))
    assert set(A.state_dict()) == {name for name, _ in A.named_parameters()}
    assert type(A).__name__ in repr(A)


@pytest.mark.parametrize("A", MODULES[:4], ids=lambda A: type(A).__name__)
def test_functional_call_uses_the_given_weights(A: op.Operator) -> None:
    v = example(A)
    with torch.no_grad():
        A(v)  # were anything remembered, the next call would return it
        given = {name: 3 * torch.randn_like(p) for name, p in A.named_parameters()}
        changed = torch.func.functional_call(A, given, (v,))
        twin = copy.deepcopy(A)
        twin.load_state_dict(given)
    assert torch.equal(changed, twin(v))
    assert not torch.equal(changed, A(v))


def test_writes_through_data_are_seen() -> None:
    A = op.Dense(3, 4, bound=0.5)
    with torch.no_grad():
        before = A(torch.ones(1, 3))
        A.weight.data = -A.weight.data
        assert torch.equal(A(torch.ones(1, 3)), -before)


def test_vmap_over_weights() -> None:
    A, v = op.Conv2d(2, 3, 3, bound=0.5), torch.randn(1, 2, 4, 4)
    stacked = torch.randn(3, *A.weight.shape)
    many = torch.func.vmap(lambda w: torch.func.functional_call(A, {"weight": w}, (v,)))(stacked)
    one_by_one = [torch.func.functional_call(A, {"weight": w}, (v,)) for w in stacked]
    torch.testing.assert_close(many, torch.stack(one_by_one))


def test_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert op.Conv2d(2, 3, 3, bound=0.5).weight.is_meta


def test_inference_mode_leaves_nothing_behind() -> None:
    A, v = op.Conv2d(2, 3, (5, 7), bound=0.5), torch.randn(1, 2, 4, 4)
    with torch.inference_mode():
        A(v)
    A(v).sum().backward()
    assert A.weight.grad is not None
    assert A.weight.grad.isfinite().all()


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: op.Dense(0, 3), "m should be at least 1; got 0"),
        (lambda: op.Dense(3, 2.0), r"n should be a whole number; got 2\.0"),
        (lambda: op.Dense(True, 2), "m should be a whole number; got True"),
        (lambda: op.Conv2d(-1, 3, 3), "c should be at least 1; got -1"),
        (lambda: op.SeparableConv2d(3, "4", 3), "m should be a whole number; got '4'"),
        (lambda: op.Conv2d(3, 3, 4), "kernel_size should be odd; got 4"),
        (lambda: op.SeparableConv2d(3, 3, (3, 2)), "kernel_size should be odd; got 2"),
        (lambda: op.Conv2d(3, 3, 0), "kernel_size should be at least 1; got 0"),
        (lambda: op.Conv2d(3, 3, (3, 3, 3)), "kernel_size should be an odd integer or a pair"),
        (lambda: op.Patches(0, 2), "split should be at least 1"),
        (lambda: op.Patches(2, -2), "patch should be at least 1"),
        (lambda: op.ConvChain(3), "at least input and output channels; got 3"),
        (lambda: op.ConvChain((1, 2.0)), r"channels should be a whole number; got 2\.0"),
        (lambda: op.ConvChain((1, 2), zero_mean=1), "zero_mean should be True or False; got 1"),
        (
            lambda: op.gaussian_kernel(math.inf),
            "standard deviation of a blur should be a positive finite number; got inf",
        ),
        (lambda: op.gaussian_kernel(1.0, size=-1), "size should be at least 1; got -1"),
        (lambda: op.Blur("1"), "standard deviation of a blur should be a positive number; got '1'"),
        (lambda: op.Blur(torch.full((3, 3), math.nan)), "Blur.kernel should have entries, all of them finite"),
        (lambda: op.Blur(torch.ones(3, 3, dtype=torch.complex64)), "Blur.kernel should be a tensor of real numbers"),
        (lambda: op.Downsample(2, [[1.0]]), r"Downsample.kernel should be a tensor of real numbers; got \[\[1\.0\]\]"),
        (lambda: op.Mask(torch.tensor([1.0, math.inf])), r"Mask.mask should have entries.*inf"),
        (lambda: op.Mask(torch.ones(0)), "Mask.mask should have entries"),
        (lambda: op.Mask(3), "Mask.mask should be a tensor of real numbers; got 3"),
        (lambda: op.kernel_norm(torch.ones(2, 2, 3)), r"kernel should be .* got \(2, 2, 3\)"),
        (lambda: op.Stack([]), "at least one operator"),
        (lambda: op.Stack([op.Identity()]), "know the size of their output"),
        (lambda: op.Stack([op.Dense(3, 3), op.Conv2d(3, 3, 3)]), "convolutions or matrices, not both"),
        (lambda: op.Stack([op.Dense(3, 3), op.Dense(4, 3)]), r"same number of input features; got \[3, 4\]"),
    ],
)
def test_wrong_options(make: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("bound", [0, -1.0, float("inf"), float("nan"), "1", True])
@pytest.mark.parametrize("make", [lambda b: op.Dense(2, 2, b), lambda b: op.Conv2d(2, 2, 3, b)])
def test_wrong_bound(make: Callable[[object], op.Operator], bound: object) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=rf"bound \(None for none\) should be a positive .*; got {bound!r}"
    ):
        make(bound)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: op.Dense(3, 5)(torch.ones(2, 4)), r"Dense\(3, 5\) expects .* \(\.\.\., 3\); got \(2, 4\)"),
        (lambda: op.Dense(3, 5).adjoint(torch.ones(2, 3)), r"adjoint of Dense.*\(\.\.\., 5\); got \(2, 3\)"),
        (lambda: op.Downsample(2).adjoint(torch.ones(4, 3)), r"adjoint of Downsample.*\(B, c, h, w\); got \(4, 3\)"),
        (lambda: op.Dense(3, 5)(torch.tensor(1.0)), r"got \(\)"),
        (lambda: op.Conv2d(3, 5, 3)(torch.ones(1, 4, 2, 2)), r"\(batch, 3, height, width\); got \(1, 4, 2, 2\)"),
        (lambda: op.Conv2d(3, 5, 3)(torch.ones(3, 2, 2)), r"\(batch, 3, height, width\); got \(3, 2, 2\)"),
        (lambda: op.Conv2d(3, 5, 3).adjoint(torch.ones(1, 3, 2, 2)), r"adjoint.*\(batch, 5, height, width\)"),
        (lambda: op.SeparableConv2d(3, 5, 3)(torch.ones(1, 5, 2, 2)), r"separable.*\(batch, 3, height, width\)"),
        (lambda: op.SeparableConv2d(3, 5, 3).adjoint(torch.ones(1, 3, 2, 2)), r"\(batch, 5, height, width\)"),
        (lambda: op.resample(torch.ones(1, 1, 4, 6), 4), r"from \(4, 6\) to \(4, 4\)"),
        (lambda: op.resample(torch.ones(1, 1, 6, 6), 4), r"from \(6, 6\) to \(4, 4\)"),
        (lambda: op.resample(torch.ones(1, 1, 4, 4), (8, 4)), r"from \(4, 4\) to \(8, 4\)"),
        (lambda: op.resample(torch.ones(1, 1, 4, 4), (2, 8)), r"from \(4, 4\) to \(2, 8\)"),
        (lambda: op.resample(torch.ones(1, 1, 4, 4), 0), r"from \(4, 4\) to \(0, 0\)"),
        (lambda: op.resample(torch.ones(4, 4), 2), r"expects images .* got \(4, 4\)"),
        (lambda: op.Patches(2, 2)(torch.ones(1, 3, 4, 4)), "3 channels .* groups of split=2"),
        (lambda: op.Patches(2, 2)(torch.ones(1, 2, 4, 5)), "4 x 5 pixels .* squares of patch=2"),
        (lambda: op.Patches(2, 2)(torch.ones(2, 4, 4)), r"\(batch, channels, height, width\); got \(2, 4, 4\)"),
        (lambda: op.Patches(2, 2).prepare().grid((4, 4)), r"should end with \(channels, height, width\); got \(4, 4\)"),
        (lambda: op.Patches(2, 2).adjoint(torch.ones(1, 1, 2, 2, 9)), r"rows, columns, 8\); got \(1, 1, 2, 2, 9\)"),
        (lambda: op.Patches(2, 2).adjoint(torch.ones(1, 4, 8)), r"rows, columns, 8\); got \(1, 4, 8\)"),
        (lambda: op.Stack([op.Dense(3, 2), op.Dense(3, 1)]).adjoint(torch.ones(1, 2)), r"expects 3 entries .*\[2, 1\]"),
    ],
)  # fmt: skip
def test_wrong_shapes(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_operator_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        op.Operator()  # type: ignore[abstract]


def test_a_user_writes_an_operator() -> None:
    """The base class needs prepare and norm; forward and adjoint follow."""

    class Scale(op.Operator):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(2.0))

        def prepare(self) -> op.LinearMap:
            return op.Dense(1, 1).prepare().__class__(self.factor * torch.eye(3))

        def norm(self) -> Tensor:
            return self.factor.detach().abs()

    assert torch.equal(Scale()(torch.ones(3)), 2 * torch.ones(3))
    assert torch.equal(Scale().adjoint(torch.ones(3)), 2 * torch.ones(3))
    assert op.module_norm(Scale()) == 2


@pytest.mark.parametrize("factor", [2, 3, 4, 5])
def test_downsampling_is_the_mean_of_blocks(factor):
    images = torch.randn(2, 3, 2 * factor, 3 * factor, dtype=torch.float64)
    means = images.reshape(2, 3, 2, factor, 3, factor).mean(dim=(3, 5))
    torch.testing.assert_close(op.Downsample(factor).double()(images), means)


def test_masks_keep_their_precision():
    weights = torch.linspace(0.1, 1, 4, dtype=torch.float64)
    mask = op.Mask(weights)
    assert torch.equal(mask(torch.ones(1, 4, dtype=torch.float64))[0], weights)
    assert float(mask.norm()) == float(torch.linalg.matrix_norm(torch.diag(weights), 2))
    assert mask(torch.ones(1, 4)).dtype == torch.float32
    for made in (op.Mask(weights > 0.5), op.Mask((weights > 0.5).long())):
        assert made.mask.dtype == torch.float32
        assert made.double().mask.tolist() == made.half().mask.tolist() == [0, 0, 1, 1]


def test_masks_do_not_repeat_images():
    mask = op.Mask(torch.ones(3, 1, 1))
    assert mask(torch.ones(2, 3, 4, 4)).shape == (2, 3, 4, 4)
    with pytest.raises(ValueError, match=r"Mask expects an input of shape to which its mask \(3, 1, 1\) is expanded"):
        mask(torch.ones(2, 1, 4, 4))
