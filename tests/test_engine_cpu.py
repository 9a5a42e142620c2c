"""A user's objective on a CPU: traced gradients and products give what the plain path gives, and are never stale."""

from __future__ import annotations

import enum
import gc
import math
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import opteq
import written
from cases import Jumps, Smoother, TwoParts
from objective import FieldOfExperts
from opteq import operators as op
from opteq.engine import log, traced, values_read
from opteq.engine.flatten import flatten
from opteq.engine.settings import settings
from opteq.engine.trace import Traced
from opteq.engine.values_read import NotFlattenableError

aten = torch.ops.aten
WEIGHT = 0.1
OFFSET = torch.ones(4, dtype=torch.float64)
SCALE = torch.tensor(0.2)
CONFIG = SimpleNamespace(weight=0.2)
CONFIGS = {"first": [CONFIG]}
TABLE = [0.2] * 65
SHORT = {"weights": [0.2, (0.3, None)], "names": {"a"}}
ARRAY = np.full(3, 0.2)
LAYER = nn.Linear(4, 1).double()
OTHERS = ModuleType("others")  # a module of the user's own
OTHERS.config, OTHERS.inner, OTHERS.weight = SimpleNamespace(weight=0.2), ModuleType("inner"), 0.2
OTHERS.inner.options = SimpleNamespace(weight=0.2)
DTYPE, DEVICE, SIZE, FORMAT = torch.float64, torch.device("cpu"), torch.Size([4]), torch.contiguous_format


pytestmark = pytest.mark.usefixtures("traced_at_once")


def weight() -> float:
    return WEIGHT


class Mode(enum.Enum):
    SOFT = 0.2
    HARD = 0.4


MODE = Mode.SOFT


@cache
def doubled(value: float) -> float:
    return 2 * value


@cache
def cached() -> float:
    return CONFIG.weight


class Potential:
    """Something to call that is no module."""

    def __call__(self, y: Tensor) -> Tensor:
        return CONFIG.weight * y.sum(1)


def convolved() -> opteq.HiddenProblem:
    """OptEq on images, as a user would write it."""
    return written.Written(op.Conv2d(4, 6, 3, bound=0.9), nn.Conv2d(4, 6, 3, padding=1))


def exact(problem: opteq.problems.Problem) -> opteq.Equilibrium:
    """A layer that both paths solve to the last digits, in whichever variable."""
    return opteq.Equilibrium(problem.double(), opteq.Anderson(tol=1e-13), opteq.Implicit(tol=1e-13))


class Weighted(opteq.HiddenProblem):
    """Its numbers are an attribute, one of its class, and one that a function reads from this module."""

    penalty = "relu"
    of_class = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.own = 0.1

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return (self.own + self.of_class + weight()) * y.square().sum(1) - (x * y).sum(1)


class Level:
    """A descriptor with a number of its own."""

    def __init__(self, level: float) -> None:
        self.level = level

    def __get__(self, owner: object, kind: type) -> float:
        return self.level


LEVEL = Level(0.2)


class Levelled(Weighted):
    level = LEVEL

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return super().smooth(y, x) + self.level * y.sum(1)


class Secretive:
    """Its pickle does not have its number."""

    def __init__(self, weight: float = 0.2) -> None:
        self.weight = weight

    def __getstate__(self) -> dict[str, float]:
        return {}

    def __setstate__(self, _: dict[str, float]) -> None:
        self.weight = 0.2

    def __call__(self, y: Tensor) -> Tensor:
        return self.weight * y.sum(1)


class ByName(Secretive):
    def __reduce__(self) -> str:
        return "BY_NAME"


BY_NAME = ByName()


class Listed(Weighted):
    """Reads a buffer as numbers, and how many there are above a level."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.counted = counted
        self.register_buffer("levels", torch.tensor([0.1, 0.2]))

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        number = len(self.levels[self.levels > 0.15]) if self.counted else sum(self.levels.tolist())
        return super().smooth(y, x) + number * y.square().sum(1)


def with_attribute(y: Tensor) -> Tensor:
    return with_attribute.weight * y.sum(1)


with_attribute.weight = 0.2


class With(opteq.HiddenProblem):
    """A quadratic, and something more."""

    penalty = "relu"

    def __init__(self, more: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.more = more

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return 0.1 * y.square().sum(1) - (x * y).sum(1) + self.more(y)


def both_ways(layer: opteq.Equilibrium, x: Tensor, channels_last: bool = False) -> list[Tensor]:
    """Features, and the gradients of input and weights for a cotangent in either layout."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    z = layer(x)
    parts = z if isinstance(z, tuple) else (z,)
    generator = torch.Generator().manual_seed(1)
    arriving = [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in parts]
    if channels_last:
        arriving = [part.to(memory_format=torch.channels_last) for part in arriving]
    wanted = [x, *layer.parameters()]
    found = torch.autograd.grad(parts, wanted, arriving, allow_unused=True, materialize_grads=True)
    return [part.detach() for part in (*parts, *found)]


def check(layer: opteq.Equilibrium, x: Tensor, channels_last: bool = False, traced: bool = True) -> None:
    """Both paths give the same; the engine took the graphs, if it should."""
    log.latest_notes.clear()
    found = both_ways(layer, x, channels_last)
    for direction in ("forward", "backward"):
        assert log.latest(direction).startswith("traced" if traced else "plain"), log.latest(direction)
    with opteq.engine.off():
        expected = both_ways(layer, x, channels_last)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", [Smoother, TwoParts, Jumps, lambda: Jumps("soft_threshold"), Weighted])
def test_traced_objectives_give_what_the_plain_path_gives(kind: Callable[[], opteq.problems.Problem]) -> None:
    torch.manual_seed(0)
    layer = opteq.Equilibrium(kind().double())
    check(layer, torch.randn(3, 4, dtype=torch.float64))
    check(layer, torch.randn(3, 4, dtype=torch.float64))
    if kind is TwoParts:  # shapes are compared without regard to the objective
        check(layer, torch.randn(2, 4, dtype=torch.float64))


def held(v: Tensor) -> Tensor:
    """The sine, without a derivative."""
    with torch.no_grad():
        return v.sin()


class BehindWeights(With):
    """A function of a weight and the state."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda y: 0.05 * (part(self.scale * y) * y).sum(1))
        self.scale = nn.Parameter(torch.tensor(1.7))


@pytest.mark.parametrize(
    ("part", "same"), [(held, False), (Tensor.detach, True), (Tensor.tanh, True), (torch.relu, True)]
)
def test_a_graph_is_differentiated_only_where_its_derivatives_are_the_functions(
    part: Callable[[Tensor], Tensor], same: bool
) -> None:
    torch.manual_seed(0)
    layer = opteq.Equilibrium(BehindWeights(part).double(), opteq.Picard(tol=1e-12), opteq.Implicit(tol=1e-12))
    x = torch.rand(2, 4, dtype=torch.float64) + 0.5
    opteq.engine.forget()
    for _ in range(3):
        both_ways(layer, x)
    check(layer, x)
    known = [traces._known for traces in traced.kept.values()]
    assert [value for found in known for key, value in found.items() if isinstance(key, tuple)] == [same]


@pytest.mark.parametrize("state_last", [False, True])
def test_state_and_cotangent_may_differ_in_layout(state_last: bool) -> None:
    torch.manual_seed(0)
    form = torch.channels_last if state_last else torch.contiguous_format
    layer = exact(convolved().to(memory_format=form))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64).to(memory_format=form)
    for cotangent_last in (False, True, False):  # each is traced, and the first is met again
        check(layer, x, cotangent_last)
    begin = torch.rand(2, 6, 5, 5, dtype=torch.float64)  # a start in another layout
    with opteq.engine.off():
        expected = layer(x, begin)
    torch.testing.assert_close(layer(x, begin), expected, rtol=1e-8, atol=1e-9)


def test_autocast_has_graphs_of_its_own() -> None:
    torch.manual_seed(0)
    layer, x = opteq.Equilibrium(convolved()), torch.randn(2, 4, 5, 5)
    full = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
        with opteq.engine.off():
            torch.testing.assert_close(low, layer(x), rtol=0.02, atol=0.02)  # to the rounding of bfloat16
    assert low.dtype != full.dtype or not torch.equal(low, full)
    torch.testing.assert_close(layer(x), full, rtol=0, atol=0)


def test_graphs_see_new_weights_and_new_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    images = exact(convolved())
    check(images, x)
    with torch.no_grad():
        images.problem.U.weight.mul_(0.5)
        images.problem.W.weight.data = 0.3 * images.problem.W.weight.data
    check(images, x)
    x = x[:, :, 0, 0]
    layer = opteq.Equilibrium(Weighted())
    check(layer, x)
    before = layer(x)
    layer.problem.own = 0.2
    check(layer, x)
    monkeypatch.setattr(Weighted, "of_class", 0.3)
    check(layer, x)
    monkeypatch.setitem(globals(), "WEIGHT", 0.4)
    check(layer, x)
    torch.testing.assert_close(layer(x), before * 1.6 / (2 * 0.9 + 1), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (lambda y: 1e-3 * (y if float(y.detach().sum()) > 0 else -y).sum(1), "could not be traced"),
        (lambda y: 1e-9 * (torch.rand_like(y) * y).sum(1), "random numbers"),
        (lambda y: torch.stack([row[row > 0.9].sub(0.9).square().sum() for row in y]), "depends on values"),
        (lambda y: 0.1 * (y > 0.9).nonzero().shape[0] ** 0 * y.sum(1), "depends on values"),
        (lambda y: 0.1 * len(repr(y.detach())) ** 0 * y.sum(1), "on the host (__repr__)"),
        (lambda y: 0.1 * time.time() ** 0 * y.sum(1), "reads the global time.time"),
        (lambda y: 0.1 * Path("scale").is_absolute() * y.sum(1), "reads the global Path"),
        (lambda y: 0.1 * (0 if y is None else len(open.__name__)) ** 0 * y.sum(1), "calls open"),
    ],
)
def test_what_a_graph_would_not_repeat_runs_plainly(more: Callable[[Tensor], Tensor], why: str) -> None:
    layer = opteq.Equilibrium(With(more))
    x = torch.rand(2, 4, dtype=torch.float64) + 0.5
    found = both_ways(layer, x)  # the reason is found out on the way
    with opteq.engine.off():
        torch.testing.assert_close(both_ways(layer, x), found, rtol=1e-6, atol=1e-8)
    assert why in opteq.engine.report(layer, x)
    check(layer, x, traced=False)


def test_a_batch_is_freed_with_its_answer() -> None:
    """Not when the garbage collector comes by, which counts objects and does not weigh batches."""
    layer = opteq.Equilibrium(Jumps().double())

    def call() -> weakref.ref[Tensor]:
        x = torch.rand(2, 4, dtype=torch.float64)
        layer(x).sum().backward()
        assert log.latest("backward").startswith("traced")
        return weakref.ref(x)

    call()
    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


def test_hooks_on_all_modules_act() -> None:
    """They are global, so that neither a trace nor a capture that was made without them knows of them."""
    torch.manual_seed(0)
    layer, x = exact(convolved()), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    check(layer, x)
    plain = layer(x)
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, given, found: 0.5 * found if isinstance(module, nn.Conv2d) else None
    )
    try:
        assert not torch.allclose(layer(x), plain, rtol=1e-2)
        assert "hooks on all modules" in opteq.engine.report(layer, x)
    finally:
        hook.remove()
    check(layer, x)


def read_by_default(y: Tensor, config: SimpleNamespace = CONFIG) -> Tensor:
    return config.weight * y.sum(1)


def read_by_import(y: Tensor) -> Tensor:
    import others_on_disk

    return others_on_disk.config.weight * y.sum(1)


UNSEEN = {
    "object": (lambda y: CONFIG.weight * y.sum(1), lambda: setattr(CONFIG, "weight", 0.4), "global CONFIG, a SimpleN"),
    "inner": (lambda y: (lambda: CONFIG.weight)() * y.sum(1), lambda: setattr(CONFIG, "weight", 0.4), "global CONFIG"),
    "objects": (lambda y: CONFIGS["first"][0].weight * y.sum(1), lambda: setattr(CONFIG, "weight", 0.4), "a dict"),
    "table": (lambda y: TABLE[3] * y.sum(1), lambda: TABLE.__setitem__(3, 0.4), "the global TABLE, a list"),
    "array": (lambda y: float(ARRAY[1]) * y.sum(1), lambda: ARRAY.__setitem__(1, 0.4), "global ARRAY, a ndarray"),
    "tensor": (lambda y: (0.2 * OFFSET * y).sum(1), lambda: OFFSET.mul_(2), "the global OFFSET, a Tensor"),
    "number": (lambda y: float(SCALE) * y.sum(1), lambda: SCALE.mul_(2), "the global SCALE, a Tensor"),
    "module": (lambda y: LAYER(y)[:, 0], lambda: LAYER.weight.data.add_(0.3), "the global LAYER, a Linear"),
    "alias": (
        lambda y: OTHERS.config.weight * y.sum(1),
        lambda: setattr(OTHERS.config, "weight", 0.4),
        "the global others.config, a SimpleNamespace",
    ),
    "aliases": (
        lambda y: OTHERS.inner.options.weight * y.sum(1),
        lambda: setattr(OTHERS.inner.options, "weight", 0.4),
        "the global inner.options, a SimpleNamespace",
    ),
    "import": (read_by_import, lambda: setattr(OTHERS.config, "weight", 0.4), "the global others.config"),
    "helper": (lambda y: read_by_default(y), lambda: setattr(CONFIG, "weight", 0.4), "default 0 of read_by_default"),
    "cached": (
        lambda y: cached() * y.sum(1),
        lambda: (setattr(CONFIG, "weight", 0.4), cached.cache_clear()),
        "the global CONFIG, a SimpleNamespace",
    ),
    "call": (Potential(), lambda: setattr(CONFIG, "weight", 0.4), "the global CONFIG, a SimpleNamespace"),
    "method": (
        lambda y: random.uniform(0.2, 0.2000001) * y.sum(1),
        lambda: setattr(random, "uniform", lambda *_: 0.4),
        "the global random.uniform, a method",
    ),
}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What tests of this module change is restored."""
    monkeypatch.setitem(sys.modules, "others_on_disk", OTHERS)
    for holder in (CONFIG, OTHERS.config, OTHERS.inner.options):
        monkeypatch.setattr(holder, "weight", 0.2)
    monkeypatch.setattr(random, "uniform", random.uniform)
    tensors = [(tensor, tensor.detach().clone()) for tensor in (OFFSET, SCALE, LAYER.weight)]
    cached.cache_clear()
    yield
    TABLE[:], ARRAY[:] = [0.2] * 65, 0.2
    for tensor, values in tensors:
        tensor.data.copy_(values)


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", list(UNSEEN))
def test_code_that_reads_an_object_runs_plainly(name: str) -> None:
    more, change, why = UNSEEN[name]
    layer, x = opteq.Equilibrium(With(more)), torch.rand(2, 4, dtype=torch.float64) + 2.0
    with pytest.raises(NotFlattenableError, match=r"^it reads the .*: pass it as an attribute of the module$"):
        flatten(layer.problem(x))  # on a GPU too
    report = opteq.engine.report(layer, x.requires_grad_())
    assert report.count("plain path: it reads the ") == 2
    assert why in report
    before = layer(x)
    change()
    after = layer(x)
    assert (after - before).abs().max() > 0.01
    with opteq.engine.off():
        torch.testing.assert_close(layer(x), after, rtol=0, atol=0)


def stronger(self: With, y: Tensor, x: Tensor) -> Tensor:
    return 0.5 * y.square().sum(1) - (x * y).sum(1)


stronger.__name__ = "smooth"

HIDDEN = {
    "descriptor": (Levelled, lambda _: setattr(LEVEL, "level", 0.6)),
    "pickle": (lambda: With(Secretive()), lambda problem: setattr(problem.more, "weight", 0.6)),
    "name": (lambda: With(BY_NAME), lambda problem: setattr(problem.more, "weight", 0.6)),
    "attribute": (lambda: With(with_attribute), lambda _: setattr(with_attribute, "weight", 0.6)),
    "method": (
        lambda: With(lambda y: 0.2 * y.sum(1)),
        lambda problem: setattr(problem, "smooth", MethodType(stronger, problem)),
    ),
    "list": (lambda: Listed(False), lambda problem: problem.levels.add_(0.2)),
    "mask": (lambda: Listed(True), lambda problem: problem.levels.add_(0.2)),
    "globals": (lambda: With(lambda y: globals()["WEIGHT"] * y.sum(1)), lambda _: globals().update(WEIGHT=0.6)),
    "vars": (lambda: With(lambda y: vars(OTHERS)["weight"] * y.sum(1)), lambda _: setattr(OTHERS, "weight", 0.6)),
    "getattr": (
        lambda: With(lambda y: getattr(OTHERS, "wei" + "ght") * y.sum(1)),
        lambda _: setattr(OTHERS, "weight", 0.6),
    ),
    "variable": (
        lambda: With(lambda y: float(os.getenv("OPTEQ_TEST", "0.2")) * y.sum(1)),
        lambda _: os.environ.__setitem__("OPTEQ_TEST", "0.6"),
    ),
    "parametrised": (
        lambda: With(nn.Sequential(weight_norm(nn.Linear(4, 1)), nn.Flatten(0)).double()),
        lambda problem: problem.more[0].parametrizations.weight.original0.data.mul_(3),
    ),
}


@pytest.mark.parametrize("name", list(HIDDEN))
def test_changes_that_a_pickle_does_not_show_take_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LEVEL, "level", 0.2)
    monkeypatch.setattr(BY_NAME, "weight", 0.2)
    monkeypatch.setattr(with_attribute, "weight", 0.2)
    monkeypatch.setattr(OTHERS, "weight", 0.2)
    monkeypatch.setitem(sys.modules, "others", OTHERS)
    monkeypatch.setitem(globals(), "WEIGHT", 0.1)
    monkeypatch.setenv("OPTEQ_TEST", "0.2")
    made, change = HIDDEN[name]
    layer, x = opteq.Equilibrium(made()), torch.rand(2, 4, dtype=torch.float64) + 2.0
    before = both_ways(layer, x)[0]
    change(layer.problem)
    after = both_ways(layer, x)
    assert (after[0] - before).abs().max() > 0.01
    with opteq.engine.off():
        torch.testing.assert_close(after, both_ways(layer, x), rtol=1e-8, atol=1e-9)


def test_powers_of_weights_are_traced() -> None:
    """Torch's own functions of such operators wrap what is no Python function."""

    class Powers(With):
        def __init__(self) -> None:
            super().__init__(lambda y: 0.1 * y.sum(1))
            self.w = nn.Parameter(torch.rand(4, dtype=torch.float64))

        def smooth(self, y: Tensor, x: Tensor) -> Tensor:
            return super().smooth(y, x) + (self.w**2 * (1 - self.w) * y).sum(1)

    check(opteq.Equilibrium(Powers()), torch.rand(2, 4, dtype=torch.float64) + 1.0)


def test_class_attributes_and_closures_that_hold_objects_run_plainly() -> None:
    config, x = SimpleNamespace(weight=0.1), torch.rand(2, 4, dtype=torch.float64)

    class Closed(Weighted):
        def smooth(self, y: Tensor, x: Tensor) -> Tensor:
            return super().smooth(y, x) + config.weight * y.square().sum(1)

    class Shared(Weighted):
        config = SimpleNamespace(weight=0.1)

        def smooth(self, y: Tensor, x: Tensor) -> Tensor:
            return super().smooth(y, x) + self.config.weight * y.square().sum(1)

    for kind, held, why in (
        (Closed, config, "it reads the variable config, a SimpleNamespace"),
        (Shared, Shared.config, "it reads the class attribute Shared.config, a SimpleNamespace"),
    ):
        layer = opteq.Equilibrium(kind())
        before = layer(x)
        assert why in opteq.engine.report(layer, x)
        held.weight = 0.4
        torch.testing.assert_close(layer(x), before * 1.8 / 2.4, rtol=1e-3, atol=1e-9)


@torch.enable_grad()
def read_decorated(y: Tensor) -> Tensor:
    return weight() * y.sum(1)


@pytest.mark.parametrize(
    "more",
    [
        lambda y: SHORT["weights"][0] * y.sum(1),
        lambda y: MODE.value * y.to(DTYPE).to(DEVICE).sum(1) * SIZE[0],
        lambda y: Mode.HARD.value * y.clone(memory_format=FORMAT).sum(1),
        lambda y: math.sqrt(np.prod(y.shape[1:]) * np.pi) * nn.functional.softplus(y).sum(1),
        lambda y: OTHERS.weight * torch.ops.aten.sum(y, [1]) * doubled(0.1),
        lambda y: 0.1 * torch.logsumexp(y, dim=1) + read_decorated(y),
    ],
)
def test_code_that_reads_plain_values_and_functions_is_traced(more: Callable[[Tensor], Tensor]) -> None:
    check(opteq.Equilibrium(With(more)), torch.rand(2, 4, dtype=torch.float64) + 1.0)


def test_torch_may_lie_beside_the_users_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that was built from its sources is in no folder of installed packages."""
    monkeypatch.setattr(torch, "__file__", "/home/user/pytorch/torch/__init__.py")
    values_read._is_local.cache_clear()
    check(opteq.Equilibrium(With(lambda y: read_decorated(y))), torch.rand(2, 4, dtype=torch.float64) + 1.0)


def test_written_objectives_of_the_benchmarks_are_traced() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    check(opteq.Equilibrium(FieldOfExperts().double()), x)
    check(exact(written.Written(op.Conv2d(1, 3, 3, bound=0.9), nn.Conv2d(1, 3, 3, padding=1))), x)


@pytest.mark.usefixtures("kept")
def test_graphs_see_changed_values_and_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    number, x = 0.1, torch.rand(2, 4, dtype=torch.float64)

    class Closed(Weighted):
        def smooth(self, y: Tensor, x: Tensor) -> Tensor:
            return super().smooth(y, x) + (number + MODE.value + SHORT["weights"][0]) * y.square().sum(1)

    layer = opteq.Equilibrium(Closed())
    check(layer, x)
    number = 0.3
    check(layer, x)
    monkeypatch.setitem(globals(), "MODE", Mode.HARD)
    check(layer, x)
    monkeypatch.setitem(SHORT, "weights", [0.5])
    check(layer, x)
    monkeypatch.setitem(globals(), "weight", lambda: 0.7)  # a cell of a notebook that is run again
    check(layer, x)
    monkeypatch.setattr(Weighted, "smooth", lambda _, y, x: y.square().sum(1) - (x * y).sum(1))
    check(layer, x)


def test_a_graph_raises_where_a_factorisation_fails() -> None:
    A, y = torch.eye(3), torch.randn(2, 3)

    def function(known: list[Tensor], varying: list[Tensor]) -> list[Tensor]:
        return [varying[0] @ torch.linalg.cholesky(known[0])]

    made = Traced(function, [A], [y], compile_functions=False)
    made.bind([A])
    with pytest.raises(torch.linalg.LinAlgError, match="not positive"):
        made.bind([-A])


def test_a_number_that_is_made_a_tensor_inside_is_traced() -> None:
    check(opteq.Equilibrium(With(lambda y: (torch.tensor(0.2) * y).sum(1))), torch.rand(2, 4, dtype=torch.float64))


def test_the_first_calls_and_what_is_not_written_run_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "calls_before_tracing", 1)
    layer, x = opteq.Equilibrium(Weighted()), torch.rand(2, 4)
    layer(x)
    assert "first 1 calls" in log.latest("forward")
    layer(x)
    assert log.latest("forward").startswith("traced")

    class Counting(Weighted):
        calls = 0

        def start(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.zeros_like(x)

    assert "where an attribute changes, calls are counted anew" in opteq.engine.report(opteq.Equilibrium(Counting()), x)
    built_in = opteq.Equilibrium(opteq.OptEq(op.Dense(3, 4, bound=0.9)))
    assert "only a HiddenProblem or an Objective" in opteq.engine.report(built_in, x)


def test_signs_of_a_traced_gradient_meet_and_go() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 4), torch.randn(3, 4)

    def step(fixed: list[Tensor], varying: list[Tensor]) -> list[Tensor]:
        weight, offset = fixed
        image = -torch.mm(-torch.mm(varying[0], weight), weight.t())
        return [-(-offset + -image), -(2 * image), image]

    traced, y = Traced(step, [a, b], [b], compile_functions=False), torch.randn(3, 4)
    torch.testing.assert_close(traced.bind([a, b])([y]), step([a, b], [y]), rtol=0, atol=0)
    targets = [node.target for node in traced.each.graph.nodes if node.op == "call_function"]
    assert aten.neg.default not in targets
    assert targets.count(aten.mul.Scalar) <= 1  # twice the image
