"""Products that solves on a CPU prepare: joined kernels and Winograd's algorithm give what plain convolutions give."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opteq
from opteq import _room
from opteq import operators as op
from opteq._fast import fast_paths
from opteq._room import Room, room
from opteq.operators import coarse, joined, prepared, winograd
from opteq.operators.conv import ConvMap
from opteq.operators.prepared import PreparedConv
from opteq.states import is_channels_last


@pytest.fixture(autouse=True)
def plain_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without units for bfloat16, and with Winograd's algorithm for few channels too."""
    monkeypatch.setattr(coarse, "_multiplies_tiles", lambda: False)
    monkeypatch.setattr(prepared, "_LEAST_CHANNELS", 4)


def pictures(*shape: int, last: bool = True) -> Tensor:
    made = torch.randn(*shape)
    return made.contiguous(memory_format=torch.channels_last) if last else made


def off(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true.double()).norm() / true.double().norm())


SHAPES = [(4, 6, 8, 12, 3), (16, 5, 4, 4, 1), (7, 9, 16, 8, 5), (64, 64, 8, 8, 2)]


@pytest.mark.parametrize("way", ["winograd", "joined", "plain"])
@pytest.mark.parametrize("last", [True, False], ids=["channels-last", "contiguous"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_products_are_those_of_a_convolution_in_double_precision(
    shape: tuple[int, ...], last: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    c, m, height, width, batch = shape
    if way == "plain":
        monkeypatch.setattr(prepared, "has_joined_kernels", lambda: False)
    linear = ConvMap(torch.randn(m, c, 3, 3))
    v, u = pictures(batch, c, height, width, last=last), pictures(batch, m, height, width, last=last)
    products = PreparedConv(linear, u, Room() if way == "winograd" else None)
    assert (products.room is not None) == (way == "winograd" and last and min(c, m) >= 4)
    wide = linear.weight.double()
    true = F.conv2d(v.double(), wide, padding=1)
    close = 3e-6
    for _ in range(2):  # the second time in memory that was used before
        assert off(products(v), true) < close
        assert off(products.adjoint(u), F.conv_transpose2d(u.double(), wide, padding=1)) < close
        assert off(products.rectified(v, u), (true + u).relu()) < close
        assert off(products.weighed(v, u), true * u) < close
        assert off(products.rectified(v[:1], u[:1]), (true + u).relu()[:1]) < close
    assert products(v).stride() == F.conv2d(v, linear.weight, padding=1).stride()


@pytest.mark.parametrize("rough", [True, False], ids=["winograd", "plain"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_derivatives_by_the_weight_are_those_of_autograd(shape: tuple[int, ...], rough: bool) -> None:
    torch.manual_seed(0)
    c, m, height, width, batch = shape
    weight = torch.randn(m, c, 3, 3)
    like = pictures(batch, m, height, width)
    total = PreparedConv(ConvMap(weight), like, Room() if rough else None).weight_sum()
    assert isinstance(total, winograd.WinogradSum) == rough
    double = weight.double().requires_grad_()
    true = torch.zeros_like(double)
    for _ in range(3):
        v, u = pictures(batch, c, height, width), pictures(batch, m, height, width)
        total.add(v, u)
        true += torch.autograd.grad(F.conv2d(v.double(), double, padding=1), double, u.double())[0]
    assert total.result().shape == weight.shape
    assert off(total.result(), true) < 3e-6


def test_an_adjoint_is_one() -> None:
    torch.manual_seed(0)
    v, u = pictures(2, 8, 8, 4), pictures(2, 12, 8, 4)
    products = PreparedConv(ConvMap(torch.randn(12, 8, 3, 3)), u, Room())
    assert products.room is not None
    torch.testing.assert_close((products(v) * u).sum(), (products.adjoint(u) * v).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kernel", "side"), [((1, 3), 8), ((5, 5), 8), ((3, 3), 7), ((3, 3), 6), ((1, 1), 4)])
@torch.no_grad()
def test_other_kernels_and_sides_have_no_tiles(kernel: tuple[int, int], side: int) -> None:
    linear = ConvMap(torch.randn(6, 5, *kernel))
    v, u = pictures(2, 5, side, side), pictures(2, 6, side, side)
    products = PreparedConv(linear, u, Room())
    assert products.room is None
    assert off(products.rectified(v, u), (linear(v) + u).relu()) < 1e-6
    assert off(products.adjoint(u), linear.adjoint(u)) < 1e-6


@pytest.mark.parametrize("rough", [True, False])
@torch.no_grad()
def test_what_is_not_a_number_stays_what_it_is(rough: bool) -> None:
    linear = ConvMap(torch.randn(8, 8, 3, 3))
    v, u = pictures(2, 8, 4, 4), pictures(2, 8, 4, 4)
    u[0, 0, 0, 0] = torch.nan
    found = PreparedConv(linear, u, Room() if rough else None).rectified(v, u)
    assert found[0, 0, 0, 0].isnan()
    assert int(found.isnan().sum()) == 1
    v[1, 0, 0, 0] = torch.nan
    found = PreparedConv(linear, u, Room() if rough else None).rectified(v, u)
    assert found[1, :, 0, 0].isnan().all()
    assert not found[0, 1:].isnan().any()


@torch.no_grad()
def test_a_weight_that_was_changed_is_prepared_again() -> None:
    linear = ConvMap(torch.randn(8, 8, 3, 3))
    v, u = pictures(2, 8, 4, 4), pictures(2, 8, 4, 4)
    for where in (Room(), None):
        before = PreparedConv(linear, u, where)(v)
        linear.weight.mul_(2)
        torch.testing.assert_close(PreparedConv(linear, u, where)(v), 2 * before)
    assert linear.prepared
    assert not copy.deepcopy(linear).prepared
    assert not pickle.loads(pickle.dumps(linear)).prepared


def test_without_onednn_there_are_no_joined_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    assert not joined.has_joined_kernels()


# Memory that is used again.


def test_a_room_is_kept_and_never_shared() -> None:
    with room() as first:
        first.take("memory", 3).fill_(1)
        with room() as second:  # a solve inside of a solve
            assert second is not first
        others: list[Room] = []

        def elsewhere() -> None:
            with room() as other:
                others.append(other)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert others[0] is not first
    with room() as again:
        assert again in (first, second)


def test_a_large_room_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_room, "_MOST_KEPT", 100)
    monkeypatch.setattr(_room._rooms, "free", [])
    with room() as first:
        first.take("memory", 100)
    with room() as second:
        assert second is not first


def test_memory_made_in_inference_mode_can_be_written_to_outside_of_it() -> None:
    mine = Room()
    with torch.inference_mode():
        mine.take("memory", 4).fill_(1)
    mine.take("memory", 4).add_(1)
    assert mine.take("memory", 2, 2).tolist() == [[2, 2], [2, 2]]


# Layers.


def layer(
    channels: int = 8, hidden: int = 12, mu: float = 1.0, tol: float = 1e-4, activation: str = "relu"
) -> opteq.Equilibrium:
    torch.manual_seed(0)
    W = op.Conv2d(channels, hidden, 3, bound=0.9)
    problem = opteq.OptEq(W, U=nn.Conv2d(3, hidden, 3, padding=1), mu=mu, activation=activation)
    return opteq.Equilibrium(problem, opteq.Anderson(tol=tol), opteq.Implicit(tol=tol))


def answers(made: opteq.Equilibrium, x: Tensor, of_state: bool = False) -> list[Tensor]:
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    solution = made.solve(x)
    assert solution.report.converged.all()
    out = solution.state if of_state else solution.features
    assert isinstance(out, Tensor)
    found = torch.autograd.grad(out.square().sum(), [x, *made.parameters()])
    return [out.detach(), *found]


@pytest.mark.parametrize("last", [True, False], ids=["channels-last", "contiguous"])
@pytest.mark.parametrize("of_state", [False, True], ids=["features", "state"])
@pytest.mark.parametrize("mu", [1.0, 1.3])
def test_layers_agree_with_the_plain_path(
    mu: float, of_state: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, x = layer(mu=mu, tol=1e-5), pictures(5, 3, 8, 8, last=last)
    with fast_paths(fused=False):
        plain = answers(made, x, of_state)
    whole = answers(made, x, of_state)
    monkeypatch.setattr(opteq.problems.expansion, "_PART", 2 * 12 * 64 * 4)
    monkeypatch.setattr(opteq.problems.expansion, "_TRANSFORMED_PART", 2 * 12 * 64 * 4)
    parts = answers(made, x, of_state)
    for one, other, third in zip(plain, whole, parts, strict=True):
        assert off(other, one) < 2e-3
        assert off(third, other) < 1e-5
    assert whole[0].stride() == parts[0].stride() == plain[0].stride()
    assert whole[1].stride() == parts[1].stride() == plain[1].stride()
    if not of_state:
        assert parts[2].stride() == made.problem.W.weight.stride()  # type: ignore[union-attr]


def test_parts_of_a_batch_are_reported_as_one_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer()
    x = pictures(7, 3, 8, 8) * torch.logspace(-2, 2, 7)[:, None, None, None]
    whole = made.solve(x.requires_grad_())
    whole.features.sum().backward()  # type: ignore[union-attr]
    monkeypatch.setattr(opteq.problems.expansion, "_TRANSFORMED_PART", 3 * 12 * 64 * 4)
    parts = made.solve(x)
    parts.features.sum().backward()  # type: ignore[union-attr]
    assert whole.backward is not None
    assert parts.backward is not None
    for one, other in ((whole.report, parts.report), (whole.backward, parts.backward)):
        assert one.steps.tolist() == other.steps.tolist()
        assert one.codes.tolist() == other.codes.tolist()
        torch.testing.assert_close(one.residual, other.residual, rtol=0.1, atol=1e-7)
        assert one.trace is not None
        assert other.trace is not None
        torch.testing.assert_close(one.trace, other.trace, rtol=0.1, atol=1e-7)


def test_samples_that_finish_early_do_not_change_the_layout() -> None:
    made, x = layer(), pictures(7, 3, 8, 8)
    start = made.solve(x).state.detach()  # type: ignore[union-attr]
    start[:3] = 0
    solution = made.solve(x, start=start)
    assert solution.steps.amax() > solution.steps.amin()
    assert is_channels_last(solution.features)  # type: ignore[arg-type]
    assert is_channels_last(solution.state)  # type: ignore[arg-type]


def test_an_empty_batch_and_a_start_go_through() -> None:
    made = layer()
    assert made(pictures(0, 3, 8, 8)).shape == (0, 8, 8, 8)
    x = pictures(3, 3, 8, 8)
    first = made.solve(x)
    again = made.solve(x, start=first.state)
    assert int(again.report.steps.max()) <= 1
    torch.testing.assert_close(again.features, first.features, rtol=1e-3, atol=1e-4)


def test_answers_are_nobodys_memory() -> None:
    made, x = layer(), [pictures(3, 3, 8, 8).requires_grad_() for _ in range(2)]
    first = made.solve(x[0])
    held = [part.detach().clone() for part in (first.features, first.state)]  # type: ignore[union-attr]
    second = made.solve(x[1])
    second.features.sum().backward()  # type: ignore[union-attr]
    assert torch.equal(held[0], first.features)  # type: ignore[arg-type]
    assert torch.equal(held[1], first.state)  # type: ignore[arg-type]
    first.features.sum().backward()  # type: ignore[union-attr]
    alone = x[0].detach().clone(memory_format=torch.preserve_format).requires_grad_()
    made(alone).sum().backward()
    assert torch.equal(alone.grad, x[0].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", ["relu", "identity", "tanh"])
def test_a_state_may_be_changed_in_place(activation: str) -> None:
    made, x = layer(activation=activation), pictures(2, 3, 8, 8)
    found = []
    for change in (False, True):
        own = x.clone(memory_format=torch.preserve_format).requires_grad_()
        solution = made.solve(own)
        loss = solution.features.square().sum()  # type: ignore[union-attr]
        if change:
            with torch.no_grad():
                solution.state.zero_()  # type: ignore[union-attr]
        made.zero_grad()
        loss.backward()
        found.append([own.grad, *(parameter.grad for parameter in made.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))  # type: ignore[arg-type]


def test_pictures_whose_sums_would_overflow_are_not_left_to_winograd() -> None:
    made, x = layer(channels=64, hidden=64), pictures(2, 3, 8, 8)
    solution, huge = made.solve(x), made.solve(x * 1e36)
    assert huge.report.converged.all()
    with torch.no_grad():
        made.problem.U.bias.zero_()  # type: ignore[union-attr, operator]
        true = made(x) * 1e36
        found = made(x * 1e36)
    assert off(found, true) < 1e-3
    assert solution.report.converged.all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_not_hidden(bad: float) -> None:
    made, x = layer(), pictures(3, 3, 8, 8).requires_grad_()
    solution = made.solve(x)
    arriving = torch.ones_like(solution.features)  # type: ignore[arg-type]
    arriving[1, 0, 0, 0] = bad
    with pytest.warns(opteq.ConvergenceWarning):
        by_x, by_weight = torch.autograd.grad(solution.features, [x, made.problem.W.weight], arriving)  # type: ignore[union-attr, arg-type]
    assert not bool(by_x[1].isfinite().any())
    assert bool(by_x[[0, 2]].isfinite().all())
    assert not bool(by_weight.isfinite().any())


@pytest.mark.parametrize("every", [1, 3, 7])
def test_a_solve_that_is_looked_at_now_and_then(every: int) -> None:
    made, x = layer(), pictures(3, 3, 8, 8)
    seldom = opteq.Equilibrium(made.problem, opteq.Anderson(tol=1e-4, check_every=every))
    one, other = made.solve(x), seldom.solve(x)
    assert other.report.converged.all()
    assert one.report.steps.tolist() == other.report.steps.tolist()
    torch.testing.assert_close(one.features, other.features)


def test_a_tight_tolerance_is_not_left_to_winograd() -> None:
    x = pictures(2, 3, 8, 8)
    with torch.no_grad(), room() as mine:
        expansion = layer().problem(x).expansion()
        assert expansion is not None
        assert expansion.solved_to(1e-4, mine).products.room is mine
        assert expansion.solved_to(1e-6, mine).products.room is None


def test_a_layer_that_was_called_in_inference_mode_can_be_trained() -> None:
    made, x = layer(), pictures(3, 3, 8, 8)
    with torch.inference_mode():
        before = made(x)
    after = made(x)
    torch.testing.assert_close(after, before)
    after.sum().backward()


def test_other_default_devices_and_dtypes_do_not_matter() -> None:
    made, x = layer(), pictures(3, 3, 8, 8)
    before = answers(made, x)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            after = answers(made, x)
    finally:
        torch.set_default_dtype(kept)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other)


def test_calls_from_several_threads_do_not_meet() -> None:
    made = layer()
    x = [pictures(4, 3, 8, 8) for _ in range(4)]
    alone = [answers(made, each) for each in x]
    found: dict[int, list[Tensor]] = {}

    def call(place: int) -> None:
        for _ in range(3):
            found[place] = answers(made, x[place])

    threads = [threading.Thread(target=call, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, own in enumerate(alone):
        for one, other in zip(own, found[place], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
