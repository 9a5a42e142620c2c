"""Law 9: a wrong option is an error that names the option and what would be right. Wrong inputs say what they are."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import operators as op
from opteq import penalties, regularizers
from opteq.gradients import Gradient
from opteq.solvers import Solver, Status
from opteq.solvers.linear import LinearSolver
from opteq.states import Layout

# ------------------------------------------------------------------------------------------------------- option fields

Bad = list[tuple[object, type[Exception]]]
NUMBER: Bad = [
    (0, ValueError),
    (-1e-3, ValueError),
    (math.nan, ValueError),
    (math.inf, ValueError),
    ("1e-3", TypeError),
    (True, TypeError),
    (torch.tensor(0.1), TypeError),
]
WHOLE: Bad = [(0, ValueError), (-2, ValueError), (2.0, TypeError), ("3", TypeError), (True, TypeError)]
SHARE: Bad = [*NUMBER, (1.01, ValueError)]
REQUIRED: Bad = [(None, TypeError)]

BAD: dict[str, Bad] = {
    "tol": NUMBER,
    "floor": [*NUMBER, *REQUIRED],
    "max_steps": [*WHOLE, *REQUIRED],
    "check_every": WHOLE,
    "memory": [*WHOLE, *REQUIRED],
    "damping": SHARE,
    "measure": [("distance", ValueError), (None, ValueError), (True, ValueError)],
    "history": [("halved", ValueError), ("", ValueError), (None, ValueError), (True, ValueError)],
    "restart": [*WHOLE, *REQUIRED],
    "steps": [*WHOLE, *REQUIRED],
    "limit": [*NUMBER, *REQUIRED],
    "gamma": NUMBER,
    "eta": SHARE,
    "rho": [*NUMBER, *REQUIRED],
    "c": [*NUMBER, *REQUIRED],
    "polish": [(-1, ValueError), (0.5, TypeError), (True, TypeError), (None, TypeError)],
    "linear": [("cg", TypeError), (opteq.CG, TypeError), (opteq.Anderson(), TypeError)],
    "regularizer": [(None, TypeError), ("ridge", TypeError), (regularizers.Ridge, TypeError), (torch.relu, TypeError)],
}

OPTIONS = [
    kind
    for kind in (getattr(opteq, name) for name in opteq.__all__)
    if isinstance(kind, type) and issubclass(kind, Solver | LinearSolver | Gradient)
]


def needed(kind: type) -> dict[str, Any]:
    """The options without a default."""
    return {"regularizer": regularizers.Ridge()} if kind is opteq.SAM else {}


def fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


BAD_OPTIONS = [
    # Without addresses: processes that share the tests have to agree on their names.
    pytest.param(kind, field, value, error, id=f"{kind.__name__}.{field}={value!r}".split(" at 0x")[0][:60])
    for kind in OPTIONS
    for field in fields(kind)
    for value, error in BAD[field]
    if not (field == "tol" and value == 0 and issubclass(kind, Solver))  # which asks for a number of steps
]


@pytest.mark.parametrize(("kind", "field", "value", "error"), BAD_OPTIONS)
def test_a_bad_value_is_named(kind: type, field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        kind(**{**needed(kind), field: value})
    message = str(caught.value)
    assert f"{kind.__name__}.{field}" in message
    assert "should" in message or "Known: " in message
    assert (value.__name__ if isinstance(value, type) else repr(value)) in message


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
class TestOptionObjects:
    def test_unknown_options_are_refused_and_the_right_ones_listed(self, kind: type) -> None:
        with pytest.raises(TypeError, match=f"{kind.__name__} has no option 'tolerance'") as caught:
            kind(**needed(kind), tolerance=1e-3)
        for field in fields(kind):
            assert field in str(caught.value)
        if "tol" in fields(kind):
            assert "did you mean 'tol'?" in str(caught.value)
        if issubclass(kind, Solver | LinearSolver):  # a bare number would not say what it is
            with pytest.raises(TypeError, match="positional"):
                kind(1e-3)

    def test_they_are_frozen_hashable_and_printable(self, kind: type) -> None:
        options = kind(**needed(kind))
        for field in fields(kind):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(options, field, getattr(options, field))
        twin = kind(**needed(kind))
        assert options == twin
        assert hash(options) == hash(twin)
        assert repr(options).startswith(f"{kind.__name__}(")
        for field in fields(kind):
            assert f"{field}=" in repr(options)

    def test_every_field_is_documented_and_has_a_default(self, kind: type) -> None:
        documented = "\n".join(base.__doc__ or "" for base in kind.__mro__)
        for field in dataclasses.fields(kind):
            assert re.search(rf"^ +{field.name}: ", documented, re.MULTILINE), field.name
            assert field.default is not dataclasses.MISSING or field.name in needed(kind)

    def test_changing_one_field_is_checked_too(self, kind: type) -> None:
        for field in fields(kind):
            value, error = (-1.0, ValueError) if field == "tol" else BAD[field][0]
            with pytest.raises(error, match=field):
                dataclasses.replace(kind(**needed(kind)), **{field: value})


def test_sam_checks_its_schedule() -> None:
    ridge = regularizers.Ridge()
    with pytest.raises(ValueError, match=r"rho \+ 2 c < 1; got rho=0.5, c=0.3"):
        opteq.SAM(regularizer=ridge, rho=0.5, c=0.3)
    with pytest.raises(ValueError, match=r"SAM.polish should be at most max_steps=10; got 11"):
        opteq.SAM(regularizer=ridge, max_steps=10, polish=11)
    with pytest.raises(TypeError, match=r"got the class Ridge; did you mean Ridge\(\)\?"):
        opteq.SAM(regularizer=regularizers.Ridge)
    unknown = regularizers.Decorrelation()
    assert unknown.gradient_lipschitz is None
    with pytest.raises(ValueError, match=r"give SAM.gamma: the gradient of Decorrelation has no known"):
        opteq.SAM(regularizer=unknown)
    with pytest.raises(ValueError, match=r"give SAM.eta"):
        opteq.SAM(regularizer=unknown, gamma=0.1)
    assert opteq.SAM(regularizer=unknown, gamma=0.1, eta=0.1).schedule() == (0.1, 0.1)


def test_options_that_would_have_no_effect_are_refused() -> None:
    for options in ({"tol": 1e-3}, {"max_steps": 7}):
        with pytest.raises(ValueError, match=r"no effect with linear.*Give them to CG"):
            opteq.Implicit(linear=opteq.CG(), **options)
    assert opteq.Implicit(linear=opteq.CG(tol=1e-3, max_steps=7)).linear == opteq.CG(tol=1e-3, max_steps=7)
    W = opteq.operators.Dense(2, 2)
    for build in (lambda: opteq.OptEq(W, gamma=0.5), lambda: opteq.DeepOptEq([(W, torch.nn.Linear(2, 2))], gamma=0.5)):
        with pytest.raises(ValueError, match=r"gamma is the weight of a regularizer, and there is none; got gamma=0.5"):
            build()
    with pytest.raises(ValueError, match=r"Gaussian.bound is of the projection .* needs hidden; got bound=0.5"):
        opteq.kernels.Gaussian(0.3, bound=0.5)


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    for info in pkgutil.walk_packages(opteq.__path__, "opteq."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for name, member in vars(module).items():
            if name.startswith("_") or getattr(member, "__module__", None) != info.name:
                continue
            if getattr(member, "_is_protocol", False):  # says what others have; nobody calls it
                continue
            if inspect.isfunction(member):
                yield f"{info.name}.{name}", member
            elif inspect.isclass(member):
                for part, method in vars(member).items():
                    function = inspect.unwrap(getattr(method, "__func__", method))
                    if inspect.isfunction(function) and (not part.startswith("_") or part == "__init__"):
                        yield f"{info.name}.{name}.{part}", function


# A model's options are those that models.describe lists, and tests/test_models.py holds that any other is refused; the
# attributes of an HTML tag are any.
CHECKED_KEYWORDS = {"opteq.models.registry.create", "opteq.report.html.markup.tag"}


def test_nothing_swallows_keywords() -> None:
    checked = 0
    for name, function in public_callables():
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds or name in CHECKED_KEYWORDS, f"{name} takes **kwargs"
        checked += 1
    assert checked > 200  # the walk does see the package


# ----------------------------------------------------------------------------------------------------------- the layer


def layer(**options: Any) -> opteq.Equilibrium:
    torch.manual_seed(0)
    return opteq.Equilibrium(opteq.OptEq(op.Dense(5, 6, bound=0.9), nn.Linear(4, 6)), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"solver": opteq.Anderson},
            r"solver should be a solver such as opteq.Anderson\(\).*did you mean Anderson\(\)\?",
        ),
        ({"solver": opteq.Implicit()}, r"solver should be a solver .*got Implicit\("),
        ({"solver": "anderson"}, r"solver should be .*got 'anderson'"),
        ({"solver": 0}, r"solver should be .*got 0"),
        ({"solver": opteq.CG()}, r"solver should be .*got CG\("),
        ({"gradient": opteq.Implicit}, r"gradient should be .*did you mean Implicit\(\)\?"),
        ({"gradient": False}, r"gradient should be .*got False"),
        ({"gradient": opteq.Picard()}, r"gradient should be .*got Picard\("),
    ],
)
def test_wrong_parts_of_a_layer(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        layer(**options)


@pytest.mark.parametrize("problem", [None, opteq.OptEq, nn.Linear(2, 2), op.Dense(2, 2), torch.relu])
def test_wrong_problems(problem: Any) -> None:
    with pytest.raises(TypeError, match=r"problem should be a hidden problem such as opteq\.OptEq"):
        opteq.Equilibrium(problem)
    if isinstance(problem, type):
        with pytest.raises(TypeError, match=r"did you mean OptEq\(\)\?"):
            opteq.Equilibrium(problem)


def test_on_failure_suggests_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"unknown on_failure 'rase'; did you mean 'raise'\? Known: ignore, raise, warn"
    ):
        layer(on_failure="rase")
    with pytest.raises(ValueError, match=r"unknown on_failure None; .*Known: ignore, raise, warn"):
        layer(on_failure=None)
    assigned = layer()
    with pytest.raises(ValueError, match=r"unknown on_failure 'rase'; did you mean 'raise'"):
        assigned.on_failure = "rase"  # it warned, where it should have raised
    with pytest.raises(ValueError, match="compile=True compiles functions that you have written; OptEq has none"):
        opteq.Equilibrium(opteq.OptEq(opteq.operators.Dense(2, 3)), compile=True)
    with pytest.raises(TypeError, match=r"compile_functions should be True or False, as .* compile; got 'max'"):
        layer(compile="max")
    with pytest.raises(TypeError, match="Equilibrium has no option 'onfailure'; did you mean 'on_failure'"):
        layer(onfailure="raise")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: [[1.0, 2.0, 3.0, 4.0]], TypeError, "should be a tensor with the batch first; got list"),
        (lambda: None, TypeError, "should be a tensor with the batch first; got NoneType"),
        (lambda: torch.tensor(1.0), ValueError, "should have a batch dimension"),
        (lambda: torch.ones(2, 4, dtype=torch.int64), TypeError, r"floating point; got torch.int64.*x.float\(\)"),
        (lambda: torch.ones(2, 4, dtype=torch.bool), TypeError, "floating point; got torch.bool"),
        (lambda: torch.ones(2, 4, dtype=torch.complex64), TypeError, "got torch.complex64.*view_as_real"),
        (lambda: torch.ones(2, 4).double(), TypeError, "torch.float64 but the weights are torch.float32"),
        (lambda: torch.ones(2, 4).half(), TypeError, "torch.float16 but the weights are torch.float32"),
        (lambda: torch.ones(2, 4, device="meta"), ValueError, "on meta but the weights are on cpu"),
        (lambda: torch.ones(2, 5), ValueError, r"U could not take an input of shape \(2, 5\)"),
        (lambda: torch.ones(4), ValueError, r"no batch dimension; its shape is \(4,\)"),
    ],
)
def test_wrong_inputs(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layer()(make())


def test_other_dtypes_are_welcome_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer()(torch.ones(2, 4).bfloat16()).shape == (2, 5)


def test_without_an_injection_the_operator_tells_the_shape() -> None:
    bare = opteq.Equilibrium(opteq.OptEq(op.Dense(5, 6, bound=0.9)))
    with pytest.raises(
        ValueError, match=r"U x \+ b should have 6 entries, as many as the output of W; it has 4 \(shape \(2, 4\)\)"
    ):
        bare(torch.ones(2, 4))


def test_inputs_that_are_not_finite() -> None:
    x = torch.ones(3, 4)
    x[1, 2], x[2, 0], x[2, 3] = torch.nan, torch.inf, -torch.inf
    words = r"3 values that are not finite, the first at index \(1, 2\)"
    with pytest.raises(ValueError, match=words):
        layer(on_failure="raise")(x)
    with pytest.warns(opteq.ConvergenceWarning, match=words):
        layer()(x)


def test_an_earlier_warning_does_not_hide_bad_inputs() -> None:
    slow = layer(solver=opteq.Picard(tol=1e-7, max_steps=2))
    with pytest.warns(opteq.ConvergenceWarning):
        slow(torch.ones(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slow(torch.ones(2, 4))  # warned already
    with pytest.warns(opteq.ConvergenceWarning, match="1 values that are not finite"):
        slow(torch.full((1, 4), torch.nan)[:, :1].expand(1, 4).clone().index_fill(1, torch.arange(3), 1.0))


def test_bad_inputs_pass_where_failures_are_ignored() -> None:
    solution = layer(on_failure="ignore").solve(torch.full((1, 4), torch.nan))
    assert solution.status == (Status.NON_FINITE,)
    assert torch.isnan(solution.state).all()
    assert torch.isnan(solution.features).all()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: torch.zeros(2, 5),
            ValueError,
            r"start should have shape \(2, 6\), like the starting state; got \(2, 5\)",
        ),
        (lambda: torch.zeros(3, 6), ValueError, r"start should have shape \(2, 6\)"),
        (lambda: (torch.zeros(2, 6),), ValueError, "start should be one tensor.*got a tuple of 1"),
        (lambda: [torch.zeros(2, 6)], TypeError, "start should be floating-point tensors.*got list"),
        (lambda: torch.zeros(2, 6, dtype=torch.int64), TypeError, "start should be floating-point.*got torch.int64"),
        (lambda: torch.zeros(2, 6, device="meta"), ValueError, "start should be on cpu.*got meta"),
    ],
)
def test_wrong_starts(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layer()(torch.ones(2, 4), start=make())


def test_a_start_may_come_from_another_precision() -> None:
    own = layer(solver=opteq.Anderson(tol=1e-5))
    x = torch.ones(2, 4)
    solved = own.solve(x)
    for dtype in (torch.float64, torch.bfloat16):
        again = own.solve(x, start=solved.state.to(dtype))
        assert again.state.dtype == torch.float32
        assert (again.steps < solved.steps).all()


def test_wrong_starts_for_a_state_of_several_tensors() -> None:
    class Two(opteq.HiddenProblem):
        penalty = "tanh"

        def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros_like(x), x.new_zeros(len(x), 2)

        def smooth(self, y: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
            return -(y[0] * x).sum(1) - 0.1 * y[1].sum(1)

    two, x = opteq.Equilibrium(Two()), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"start should be a tuple of 2 tensors.*got one tensor"):
        two(x, start=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"start should have shape \(2, 2\)"):
        two(x, start=(torch.zeros(2, 3), torch.zeros(2, 3)))


# --------------------------------------------------------------------------------------------------------- raw solvers


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        ((), ValueError, "at least one tensor; got an empty tuple"),
        ([0.0], TypeError, r"holds tensors whose first dimension is the batch; got \[0.0\]"),
        (torch.tensor(1.0), TypeError, "first dimension is the batch"),
        (torch.zeros(2, 2, dtype=torch.int32), TypeError, "floating-point tensors; got torch.int32"),
        ((torch.zeros(2, 2), torch.zeros(3, 2)), ValueError, r"same batch size; got \[\(2, 2\), \(3, 2\)\]"),
        ((torch.zeros(2, 2), torch.zeros(2, 2, device="meta")), ValueError, r"on one device; got \['cpu', 'meta'\]"),
    ],
)
def test_wrong_states(start: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        opteq.Anderson().solve(lambda y: y, start)
    with pytest.raises(error, match=message):
        Layout.of(start)


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (lambda y: y[:, :1], ValueError, r"what the map returns should have shape \(2, 2\).*got \(2, 1\)"),
        (lambda y: y.T[None], ValueError, r"should have shape \(2, 2\).*got \(1, 2, 2\)"),
        (lambda y: (y, y), ValueError, "should be one tensor.*got a tuple of 2"),
        (lambda y: None, TypeError, "floating-point tensors.*got NoneType"),
        (lambda y: y.long(), TypeError, "floating-point tensors.*got torch.int64"),
        (lambda y: y.to("meta"), ValueError, "should be on cpu.*got meta"),
    ],
)
@pytest.mark.parametrize("solver", [opteq.Picard(), opteq.Anderson(), opteq.Broyden()], ids=lambda s: type(s).__name__)
def test_a_map_that_changes_what_it_is_given(solver: Solver, step: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        solver.solve(step, torch.zeros(2, 2))


def test_a_map_may_change_precision() -> None:
    outcome = opteq.Anderson(tol=1e-12).solve(lambda y: y.bfloat16().cos(), torch.zeros(2, 3, dtype=torch.float64))
    assert outcome.tol == torch.finfo(torch.bfloat16).eps
    assert outcome.state.dtype == torch.float64
    assert (outcome.codes == 0).all()


# -------------------------------------------------------------------------------------------------- problems by a user


class Written(opteq.HiddenProblem):
    penalty = "relu"

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        return -(y * x).sum(1)


def test_smooth_must_give_one_number_a_sample() -> None:
    class Total(Written):
        def smooth(self, y: Tensor, x: Tensor) -> Tensor:
            return -(y * x).sum()

    class Kept(Written):
        def smooth(self, y: Tensor, x: Tensor) -> Tensor:
            return -(y * x)

    x = torch.ones(2, 3)
    with pytest.raises(
        ValueError, match=r"one value per sample, shape \(2,\); got shape \(\).*Sum over every dimension"
    ):
        opteq.Equilibrium(Total())(x)
    with pytest.raises(ValueError, match=r"one value per sample, shape \(2,\); got shape \(2, 3\)"):
        opteq.Equilibrium(Kept())(x)


def test_a_problem_needs_a_penalty_that_exists() -> None:
    class Without(opteq.HiddenProblem):
        def smooth(self, y: Tensor, x: Tensor) -> Tensor:
            return -(y * x).sum(1)

    class Misspelt(Written):
        penalty = "rellu"

    class Wavy(Written):
        penalty = "gelu"

    x = torch.ones(2, 3)
    with pytest.raises(TypeError, match="Without should set `penalty`"):
        opteq.Equilibrium(Without())(x)
    with pytest.raises(ValueError, match=r"unknown activation 'rellu'; did you mean 'relu'\?"):
        opteq.Equilibrium(Misspelt())(x)
    with pytest.raises(ValueError, match="'gelu' is not monotone"):
        opteq.Equilibrium(Wavy())(x)


@pytest.mark.parametrize("name", ["gelu", "silu", "mish"])
def test_activations_that_are_not_monotone_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"activation '{name}' is not monotone, so it is the prox of no penalty"):
        opteq.OptEq(op.Dense(2, 2), activation=name)


def test_a_function_of_ones_own_that_is_not_monotone() -> None:
    with pytest.raises(ValueError, match=r"monotone|decreas"):
        penalties.FromActivation(torch.sin, lipschitz=1.0)


def test_activations_must_be_names_or_penalties() -> None:
    for wrong in (torch.relu, nn.ReLU(), penalties.ReLU, 3):
        with pytest.raises(TypeError, match="an activation is a name or a Penalty"):
            opteq.OptEq(op.Dense(2, 2), activation=wrong)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"W": nn.Linear(2, 2)}, TypeError, "W should be one of opteq.operators.*got Linear"),
        ({"U": torch.ones(2, 2)}, TypeError, "U should be a torch module"),
        ({"mu": 0}, ValueError, "mu should be a positive finite number; got 0"),
        ({"mu": math.inf}, ValueError, "mu should be a positive finite number; got inf"),
        ({"gamma": -1.0}, ValueError, "gamma should be a positive finite number; got -1.0"),
        ({"regularizer": "ridge"}, TypeError, "regularizer should be one of opteq.regularizers; got 'ridge'"),
        ({"regularizer": regularizers.L1()}, ValueError, "L1 is not smooth.*Envelope"),
        ({"activaton": "relu"}, TypeError, "OptEq has no option 'activaton'; did you mean 'activation'"),
    ],
)
def test_wrong_options_of_opteq(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        opteq.OptEq(**{"W": op.Dense(2, 2), **options})


def test_a_linear_solver_that_does_not_fit_the_problem() -> None:
    problem = opteq.AffineOptEq(opteq.OptEq(op.Dense(3, 3, bound=0.9)), 2 * torch.eye(3))
    x = torch.ones(2, 3)
    for linear in (opteq.CG(), opteq.MINRES()):
        with pytest.raises(ValueError, match=f"{type(linear).__name__} needs a symmetric system.*GMRES"):
            opteq.Equilibrium(problem, gradient=opteq.Implicit(linear=linear))(x)


def test_status_messages_say_what_to_try() -> None:
    for status in Status:
        assert len(status.message) > 30
    report = opteq.Report(
        "Picard",
        residual=torch.tensor([1e-9, 0.5, torch.inf]),
        steps=torch.tensor([3, 9, 2]),
        codes=torch.tensor([0, 1, 2]),
        tol=1e-4,
    )
    message = report.describe_failures("no equilibrium")
    for part in ("2 of 3 samples: no equilibrium", "5.0e-01", "1.0e-04", "9 steps", "1x MAX_STEPS", "1x NON_FINITE"):
        assert part in message


def test_an_injection_that_changes_the_batch_is_refused() -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x])

    layer = opteq.Equilibrium(opteq.OptEq(opteq.operators.Dense(3, 4), Twice()))
    with pytest.raises(ValueError, match=r"state has batch size 4, but the input of shape \(2, 4\) has 2"):
        layer(torch.ones(2, 4))


def test_operators_take_the_names_of_torch() -> None:
    conv = opteq.operators.Conv2d(in_channels=3, out_channels=4, kernel_size=3)
    assert conv.weight.shape == nn.Conv2d(in_channels=3, out_channels=4, kernel_size=3).weight.shape
    separable = opteq.operators.SeparableConv2d(3, out_channels=4, kernel_size=3)
    assert separable.pointwise.shape == (4, 3, 1, 1)
    dense = opteq.operators.Dense(in_features=3, out_features=5)
    assert dense.weight.shape == nn.Linear(in_features=3, out_features=5).weight.shape
    with pytest.raises(TypeError, match="multiple values"):
        opteq.operators.Conv2d(3, 4, 3, in_channels=3)
    with pytest.raises(TypeError, match="no option 'in_channel'"):
        opteq.operators.Conv2d(in_channel=3, m=4, kernel_size=3)


def test_the_meta_device_has_shapes_and_nothing_to_solve() -> None:
    with torch.device("meta"):
        layer = opteq.Equilibrium(opteq.OptEq(opteq.operators.Dense(4, 8, bound=0.9), nn.Linear(3, 8)))
        x = torch.zeros(2, 3)
    features = layer(x)
    assert features.is_meta
    assert features.shape == (2, 4)
    with pytest.raises(RuntimeError, match="nothing to solve on the meta device"):
        layer.solve(x)


def test_an_option_under_both_of_its_names_is_refused() -> None:
    assert op.Dense(in_features=3, n=2).weight.shape == op.Dense(3, 2).weight.shape
    with pytest.raises(TypeError, match="Dense got 'in_features' and 'm', which are the same option: give one"):
        op.Dense(m=3, in_features=4, n=2)
