"""The base class of all hidden problems, and of those that a user writes; and the checks of what they are made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opteq import engine, penalties
from opteq.common.curvature.arithmetic import NotKnown
from opteq.common.curvature.certify import certify_smooth_part, curvature_of_terms, start_for, without_memory
from opteq.common.options import NamedOptions
from opteq.common.registration import HoldsOptions
from opteq.operators import Operator, module_norm
from opteq.operators.base import is_observer_hook
from opteq.penalties import Penalty
from opteq.problems.certificate import Certificate, SmoothPart, existence, for_finite_weights, unknown
from opteq.problems.hidden import BoundMap
from opteq.problems.written import WrittenHidden
from opteq.solvers.base import Solver
from opteq.states import State, blocks


class Problem(HoldsOptions, metaclass=NamedOptions):
    """Something whose fixed points are sought once an input is bound: ``problem(x)`` binds it."""

    takes_tuples: ClassVar[bool] = False
    """Whether the input may be a tuple of tensors: one per branch, or an image and its noise level."""

    @abstractmethod
    def bind(self, x: Any) -> BoundMap:
        """The problem with ``x`` bound. All work that depends on ``x`` and the weights alone is done here, once."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        """:meth:`forward` with its hooks, except for hooks that only watch: a bound problem has no size to report."""
        only_watched = bool(self._forward_hooks) and not is_hooked(self, backward=True)
        return self.forward(*given, **named) if only_watched else super().__call__(*given, **named)

    def forward(self, x: State) -> BoundMap:
        """Check ``x``, a tensor or, where the problem takes them, a tuple of tensors; then bind it."""
        if self.takes_tuples and isinstance(x, tuple) and x:
            for place, part in enumerate(x):
                self._check_input(part, place)
            if any(part.shape[0] != x[0].shape[0] for part in x):
                raise ValueError(f"the tensors of an input should have one batch size; got {[len(part) for part in x]}")
        else:
            self._check_input(x)
        with engine.bounded_weights(self):
            return self.bind(x)

    def default_solver(self) -> Solver | None:
        """The solver of a layer without the option ``solver``; None leaves it to the layer."""
        return None

    def default_gradient_steps(self) -> int | None:
        """Most products of the adjoint solve of a layer without the option ``gradient``; None for the usual number."""
        return None

    def smooth_part(self, norm: Callable[[Operator], float]) -> SmoothPart | None:  # noqa: ARG002
        """What follows for g from bounds on norms of operators, which ``norm`` gives; None where nothing does."""
        return None

    def certificate(self) -> Certificate:
        """Guarantees computed from the current weights."""
        return unknown(f"{type(self).__name__} declares nothing to conclude this from")

    def _check_input(self, x: Any, place: int | None = None) -> None:
        """Raise unless ``x``, the input or its tensor at a ``place``, has a batch, a dtype and a device that fit."""
        name, what = ("x", "the input") if place is None else (f"x[{place}]", f"x[{place}]")
        if not isinstance(x, Tensor):
            wanted = "a tensor with the batch first" + ", or a tuple of them" * (self.takes_tuples and place is None)
            more = "; a problem whose input is one sets takes_tuples = True" if isinstance(x, tuple) and x else ""
            raise TypeError(f"{what} should be {wanted}; got {type(x).__name__}{more}")
        if x.layout is not torch.strided:
            raise TypeError(f"{what} should be dense; got the layout {x.layout}. Convert it, e.g. {name}.to_dense()")
        if x.ndim < 1:
            raise ValueError(f"{what} should have a batch dimension; got a single number")
        if not x.is_floating_point():
            advice = f"torch.view_as_real({name})" if x.is_complex() else f"{name}.float()"
            raise TypeError(f"{what} should be floating point; got {x.dtype}. Convert it, e.g. {advice}")
        weight = next((p for p in self.parameters() if p.is_floating_point()), None)
        if weight is None:
            return
        if weight.device != x.device:
            raise ValueError(f"{what} is on {x.device} but the weights are on {weight.device}; move one of them")
        if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"{what} is {x.dtype} but the weights are {weight.dtype}; convert one of them, or use torch.autocast"
            )


class WrittenProblem(Problem):
    """A problem that a user writes: where its state begins, and what is made of it."""

    def start(self, x: Any) -> State:
        """The starting state for input ``x``."""
        return torch.zeros_like(blocks(x)[0])

    def features(self, y: Any) -> State:
        """The output of the layer."""
        state: State = y
        return state

    def _returns_state(self) -> bool:
        """Whether the layer returns y, neither its class nor the object itself having other features."""
        return getattr(self.features, "__func__", None) is WrittenProblem.features


class HiddenProblem(WrittenProblem):
    """A network defined by what it minimises: ``G(y; x) = sum f(y) + 1/2 |y|^2 + g(y; x)``.

    Write the penalty f and the smooth part g; the step ``sigma(-grad g)``, the objective, curvature products and the
    implicit gradient follow by autograd.

    - ``penalty``: an activation's name or a :class:`~opteq.penalties.Penalty`; the activation is its prox.
    - ``smooth(y, x)``: one value per sample, or a dict of named terms, which are summed.
    - ``start(x)``: the initial state, which also sets its shape; zeros like ``x`` by default.
    - ``features(y)``: the output of the layer; ``y`` by default.

    >>> import torch, opteq
    >>> class Denoiser(opteq.HiddenProblem):
    ...     penalty = "relu"
    ...     def smooth(self, y, x):
    ...         rough = (y[:, 1:] - y[:, :-1]).square().sum(1)   # neighbours should agree
    ...         return 0.1 * rough - (x * y).sum(1)              # and y should look like x
    >>> hidden = Denoiser()(torch.tensor([[1.0, -1.0, 2.0]]))
    >>> hidden.step(torch.zeros(1, 3))
    tensor([[1., 0., 2.]])
    """

    penalty: str | Penalty

    @abstractmethod
    def smooth(self, y: Any, x: Any) -> Tensor | dict[str, Tensor]:
        """g(y; x), one value per sample; or a dict of terms with one value per sample each, which are summed."""

    def bind(self, x: Tensor) -> BoundMap:
        """The problem with ``x`` bound, everything by autograd."""
        check_called(self)
        return WrittenHidden(self._activation(), self, x)

    @for_finite_weights
    def certificate(self) -> Certificate:
        """From the terms of g, as for :class:`~opteq.Objective`; existence also from an activation of bounded range.

        On the meta device, where weights have no values, it holds for all weights within the bounds of operators.
        """
        plain, activation = self._returns_state(), self._activation()
        terms, slope = without_memory(self)._terms, activation.lipschitz
        strong, contraction, lipschitz, why = certify_smooth_part(
            terms, start_for(self, WrittenProblem.start), plain, slope
        )
        smooth = contraction is not None  # the gradient of g is continuous, which Brouwer needs
        no_brouwer = "the activation is unbounded, or a step is not known to be continuous"
        exists, unique, reasons = existence(contraction, activation.bounded and smooth, no_brouwer)
        if strong and not unique:
            exists, unique, reasons = True, True, {"exists": why, "unique": why}
        return Certificate(exists, unique, contraction, lipschitz, {**reasons, "contraction": why, "lipschitz": why})

    def has_concave_smooth(self) -> bool:
        """Whether g is known to be concave in y: plain steps then never raise the objective."""
        try:
            return curvature_of_terms(without_memory(self)._terms, start_for(self, WrittenProblem.start))[1] <= 0
        except NotKnown:
            return False

    def _terms(self, y: Any, x: Any) -> dict[str, Tensor]:
        values: Any = self.smooth(y, x)
        # isinstance would ask a symbolic value for its __class__, which it refuses.
        return values if issubclass(type(values), dict) else {"smooth": values}

    def _activation(self) -> Penalty:
        penalty = getattr(self, "penalty", None)
        if penalty is None:
            raise TypeError(
                f'{type(self).__name__} should set `penalty`: the name of an activation ("identity" for none) '
                "or an opteq.penalties.Penalty"
            )
        return penalties.get(penalty)


def check_operator(W: Any, name: str) -> Operator:
    """``W`` if it is an operator without hooks."""
    if not isinstance(W, Operator):
        raise TypeError(f"{name} should be one of opteq.operators, which have an exact adjoint; got {type(W).__name__}")
    return check_unhooked(W, name)


def check_unhooked(operator: Operator, name: str, called: bool = False) -> Operator:
    """``operator``, unless it has hooks: solvers apply its prepared map, so that a hook would have no effect.

    The older utilities of torch (``torch.nn.utils.spectral_norm``, ``weight_norm``, ``prune``) work by such a hook: the
    weight would stay as it was when they were applied, and what they train would get no gradient. Where operators are
    ``called``, in a user's own functions, only hooks that come before a call, as these do, have no effect.
    """
    for part in filter(lambda module: isinstance(module, Operator), operator.modules()):
        found = _hooks(part, _HOOKS[:1] if called else _HOOKS)
        own = "forward" in vars(part) or type(part).forward is not Operator.forward
        if found or (own and not called):
            kinds = ", ".join(sorted({type(hook).__name__ for hook in found}))
            raise ValueError(
                f"{name} has {f'hooks ({kinds})' if found else 'its own forward'}, which would have no effect: its "
                "weights are read once per batch, not at every call. Reparametrise it by torch.nn.utils.parametrize "
                "(for instance torch.nn.utils.parametrizations.spectral_norm), and watch values by a hook on U or on "
                "the layer"
            )
    return operator


def check_called(problem: nn.Module) -> None:
    """Check the operators that a user's own functions call, and that a penalty with parameters is registered."""
    if isinstance(shared := getattr(type(problem), "penalty", None), nn.Module) and list(shared.parameters()):
        raise TypeError(
            f"{type(problem).__name__}.penalty has parameters, which no optimiser sees: set self.penalty in __init__"
        )
    for name, part in problem.named_modules():
        if isinstance(part, Operator):
            check_unhooked(part, name, called=True)


def is_hooked(module: nn.Module, backward: bool = False) -> bool:
    """Whether hooks may change what a call of ``module`` gives, or (``backward``) its gradient."""
    return "forward" in vars(module) or bool(_hooks(module, _HOOKS if backward else _HOOKS[:2]))


_HOOKS = ["_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"]


def _hooks(module: nn.Module, kinds: list[str]) -> list[Any]:
    return [hook for kind in kinds for hook in getattr(module, kind).values() if not is_observer_hook(hook)]


def check_injection(U: Any) -> nn.Module | None:
    """``U`` if it is a module or nothing."""
    if U is not None and not isinstance(U, nn.Module):
        raise TypeError(f"U should be a torch module from the input to the space of the state; got {U!r}")
    return U


def known_norm(U: nn.Module | None, where: str = "") -> tuple[float | None, str]:
    """``|U|``, or None and why it is not known."""
    if U is None:
        return 1.0, ""
    if (norm := module_norm(U)) is not None:
        return float(norm), ""
    why = ": it has hooks, which may change what it gives" if is_hooked(U) else ""
    return None, f"the norm of U{where}, a {type(U).__name__}, is not known{why}"


def inject(U: nn.Module | None, x: Tensor, W: Operator | None = None) -> Tensor:
    """``U x + b``, with an error that shows the input's shape; as wide as the output of ``W`` where that is known."""
    try:
        injected = x if U is None else U(x)
    except RuntimeError as error:
        raise ValueError(f"U could not take an input of shape {tuple(x.shape)}: {error}") from error
    if not isinstance(injected, torch.Tensor):
        raise TypeError(f"U should return a tensor; got {type(injected).__name__}")
    if injected.ndim < 2:  # every entry would pass for a sample, and be solved by itself
        raise ValueError(
            f"the input has no batch dimension; its shape is {tuple(x.shape)}. Give x[None] for one sample"
        )
    for name, dim, kind in (("out_channels", 1, "channels"), ("out_features", -1, "entries")):
        wanted = getattr(W, name, None)
        if isinstance(wanted, int) and injected.shape[dim] != wanted:
            raise ValueError(
                f"U x + b should have {wanted} {kind}, as many as the output of W; it has {injected.shape[dim]} (shape "
                f"{tuple(injected.shape)})"
            )
    return injected
