"""Problems that a user would write, with minus their gradients worked out by hand."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import opteq
from hunt import families, oracle
from hunt.drawing import Draw
from hunt.oracle import Equations, State, Weights
from hunt.parts import DrawnProblem, Frame
from opteq import operators as op
from opteq import potentials
from opteq.models.restoration import FilterPrior, Restoration
from opteq.models.restoration.guide import Guide
from opteq.models.restoration.noise_levels import NoiseLevels


class Bowl(opteq.HiddenProblem):
    """``g = a/2 |K y|^2 + b sum log cosh(s y) - <B x, y>``; a may be negative."""

    def __init__(self, draw: Draw, frame: Frame, a: float, b: float, s: float) -> None:
        super().__init__()
        self.penalty = frame.activation
        self.K = nn.Parameter(draw.normal(frame.features, frame.states))
        self.B = nn.Parameter(draw.normal(frame.states, frame.inputs))
        self.a, self.b, self.s = a, b, s

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.K.shape[1])

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        # torch's second derivative of logaddexp is NaN from 400 on.
        bent = (F.softplus(2 * self.s * y, threshold=60) - self.s * y).sum(1)
        pull = (y * (x @ self.B.mT)).sum(1)
        return self.a / 2 * (y @ self.K.mT).square().sum(1) + self.b * bent - pull


def one_block(
    frame: Frame,
    inside: Callable[[Weights, Tensor, State], State],
    curvature: Callable[[Weights], float],
    more: float = 0.0,
) -> Equations:
    """Of a state of one block that is its own features, with the input as ``B x``; ``more`` is rounded beside that."""
    return Equations(
        inside,
        lambda w, x, y: (frame.sigma(inside(w, x, y)[0]),),
        lambda w, x, y: y,
        [(frame.states,)],
        frame.kinks,
        lambda w: frame.slope * curvature(w),
        lambda w, x: (x.abs() @ w["B"].abs().T + more).norm(dim=1),
    )


def bowl(draw: Draw) -> DrawnProblem:
    frame = Frame.drawn(draw, images=0)
    share = draw.number(0.1, 0.9) / frame.slope
    s, split = draw.number(0.3, 2.0), draw.number(0.1, 0.9)
    problem = Bowl(draw, frame, 0.0, share * (1 - split) / s**2, s).double()
    problem.a = share * split / oracle.norm(problem.K.detach()) ** 2 * draw.one_of([1, -1])
    a, b = problem.a, problem.b

    def inside(w: Weights, x: Tensor, y: State) -> State:
        return (-a * (y[0] @ w["K"].T) @ w["K"] - b * s * torch.tanh(s * y[0]) + x @ w["B"].T,)

    # The slope of log cosh is a difference of two numbers of about a half.
    equations = one_block(frame, inside, lambda w: abs(a) * oracle.norm(w["K"]) ** 2 + b * s**2, b * s)
    name = f"own bowl a={a:.3g} b={b:.3g} s={s:.3g} {frame.activation}"
    return DrawnProblem(name, problem, equations, (frame.inputs,))


class Masked(opteq.HiddenProblem):
    """``g = a/2 <m(x), (K y)^2> - <B x / s(x), y>``: m leaves out much where C x is large, and s, from which no
    derivative is taken, is above 1 where x is. Random numbers in place of x hardly show either.
    """

    def __init__(self, draw: Draw, frame: Frame, a: float, limit: float, how: str) -> None:
        super().__init__()
        self.penalty = frame.activation
        self.K = nn.Parameter(draw.normal(frame.features, frame.states))
        self.B = nn.Parameter(draw.normal(frame.states, frame.inputs))
        self.register_buffer("C", draw.normal(frame.features, frame.inputs))
        self.a, self.limit, self.how = a, limit, how

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.K.shape[1])

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.how != "no_grad"):
            size = largest(x.detach() if self.how == "detach" else x, self.limit)
        mask = torch.where((x @ self.C.mT).abs() < self.limit, 1.0, 0.1)
        return self.a / 2 * (mask * (y @ self.K.mT).square()).sum(1) - (y * ((x / size) @ self.B.mT)).sum(1)

    def features(self, y: Tensor) -> Tensor:
        return y


def largest(x: Tensor, limit: float) -> Tensor:
    return (x.abs().amax(1, keepdim=True) / limit).clamp(min=1)


def masked(draw: Draw) -> DrawnProblem:
    frame = Frame.drawn(draw, images=0)
    limit, how = draw.power(0, 2), draw.one_of(["detach", "no_grad"])
    problem = Masked(draw, frame, 0.0, limit, how).double()
    problem.a = draw.number(0.1, 0.9) / frame.slope / oracle.norm(problem.K.detach()) ** 2 * draw.one_of([1, -1])
    a, C = problem.a, problem.C

    def inside(w: Weights, x: Tensor, y: State) -> State:
        mask = torch.where((x @ C.T).abs() < limit, 1.0, 0.1)
        pull = (x / largest(x.detach(), limit)) @ w["B"].T
        return (pull - a * (mask * (y[0] @ w["K"].T)) @ w["K"],)

    equations = one_block(frame, inside, lambda w: abs(a) * oracle.norm(w["K"]) ** 2)
    return DrawnProblem(
        f"own masked a={a:.3g} {limit=:.3g} {how} {frame.activation}", problem, equations, (frame.inputs,)
    )


class WrittenOptEq(opteq.HiddenProblem):
    """OptEq as a user would write it: ``g = -|W'y|^2 / (2 mu) - <U x, y>``."""

    def __init__(self, built_in: opteq.OptEq) -> None:
        super().__init__()
        self.penalty, self.W, self.U, self.mu = built_in.penalty, built_in.W, built_in.U, built_in.mu

    def injected(self, x: Tensor) -> Tensor:
        return x if self.U is None else self.U(x)

    def start(self, x: Tensor) -> Tensor:
        return torch.zeros_like(self.injected(x).detach())

    def smooth(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        coupling = -self.features(y).square().flatten(1).sum(1) * (self.mu / 2)
        return {"coupling": coupling, "input": -(self.injected(x) * y).flatten(1).sum(1)}

    def features(self, y: Tensor) -> Tensor:
        return self.W.adjoint(y) / self.mu


def written_opteq(draw: Draw) -> DrawnProblem:
    drawn = families.opteq_layer(draw)
    assert isinstance(drawn.problem, opteq.OptEq)
    return dataclasses.replace(drawn, name=f"own {drawn.name}", problem=WrittenOptEq(drawn.problem).double())


class Pair(opteq.HiddenProblem):
    """A state of two blocks that pull on each other: ``g = <u, M v> - <B x, u> - <D x, v>``."""

    def __init__(self, draw: Draw, frame: Frame) -> None:
        super().__init__()
        self.penalty = frame.activation
        self.M = nn.Parameter(draw.normal(frame.states, frame.features))
        self.B = nn.Parameter(draw.normal(frame.states, frame.inputs))
        self.D = nn.Parameter(draw.normal(frame.features, frame.inputs))

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.new_zeros(len(x), self.M.shape[0]), x.new_zeros(len(x), self.M.shape[1])

    def smooth(self, y: tuple[Tensor, ...], x: Tensor) -> dict[str, Tensor]:
        u, v = y
        pull = (u * (x @ self.B.mT)).sum(1) + (v * (x @ self.D.mT)).sum(1)
        return {"tied": ((u @ self.M) * v).sum(1), "pull": -pull}


def pair(draw: Draw) -> DrawnProblem:
    frame = Frame.drawn(draw, images=0)
    problem = Pair(draw, frame).double()
    problem.M.data.mul_(draw.number(0.1, 0.95) / frame.slope / oracle.norm(problem.M.detach()))

    def inside(w: Weights, x: Tensor, y: State) -> State:
        return x @ w["B"].T - y[1] @ w["M"].T, x @ w["D"].T - y[0] @ w["M"]

    equations = Equations(
        inside,
        lambda w, x, y: tuple(frame.sigma(t) for t in inside(w, x, y)),
        lambda w, x, y: y,
        [(frame.states,), (frame.features,)],
        frame.kinks,
        lambda w: frame.slope * oracle.norm(w["M"]),
        lambda w, x: (x.abs() @ w["B"].abs().T).norm(dim=1) + (x.abs() @ w["D"].abs().T).norm(dim=1),
    )
    return DrawnProblem(f"own pair {frame.activation}", problem, equations, (frame.inputs,))


QUICK = ["identity", "relu", "hardtanh", "soft_threshold"]
"""Penalties whose prox of any step length is a formula."""


# Minimisers of F + h satisfy ``y = sigma(y - grad F(y))``, whatever the step length of the library: that is the map of
# the equations. A residual of step length t is at most ``max(1, 1/t)`` times that of the library.
def objective_equations(
    frame: Frame, slope: Callable[[Weights, Tensor, Tensor], Tensor], size: Callable[[Weights, Tensor], Tensor],
    shape: tuple[int, ...], distance: Callable[[Weights], float | None],
) -> Equations:  # fmt: skip
    """Equations of an objective from the gradient of its smooth part."""

    def inside(w: Weights, x: Tensor, y: State) -> State:
        return (y[0] - slope(w, x, y[0]),)

    def of_length(w: Weights, x: Tensor, y: State, length: Tensor) -> State:
        t = length.repeat_interleave(len(y[0]) // len(length))  # samples may be repeated, for a Jacobian
        t = t.reshape(-1, *[1] * (y[0].ndim - 1))
        u = y[0] - t * slope(w, x, y[0])
        if frame.activation == "soft_threshold":  # the others are nothing, or indicator functions
            return (u.sign() * (u.abs() - 0.1 * t).clamp(min=0),)
        return (frame.sigma(u),)

    return Equations(
        inside, lambda w, x, y: (frame.sigma(inside(w, x, y)[0]),), lambda w, x, y: y, [shape], frame.kinks,
        lambda w: None, size, distance, of_length if frame.activation in QUICK else None,
    )  # fmt: skip


def objective_frame(draw: Draw) -> Frame:
    """Vectors; mostly a penalty whose prox is quick: others find a root in every step."""
    frame, quick = Frame.drawn(draw, images=0), draw.one_of(QUICK)
    return frame if draw.chance(0.15) else dataclasses.replace(frame, activation=quick)


def drawn_objective(name: str, problem: opteq.Objective, equations: Equations, shape: tuple[int, ...]) -> DrawnProblem:
    return DrawnProblem(name, problem, equations, shape, stretch=lambda x: (1 / problem(x).length).clamp_min(1))


class Least(opteq.Objective):
    """``1/2 |A y - B x|^2``, with a penalty or without."""

    def __init__(self, draw: Draw, frame: Frame, condition: float, scale: float) -> None:
        super().__init__()
        U, _, V = torch.linalg.svd(draw.normal(frame.states + 1, frame.states), full_matrices=False)
        spread = torch.logspace(0, -math.log10(condition) / 2, frame.states, dtype=torch.float64)
        self.A = nn.Parameter(scale * U @ torch.diag(spread) @ V)
        self.B = nn.Parameter(draw.normal(frame.states + 1, frame.inputs))
        self.penalty = None if frame.activation == "identity" else frame.activation
        self.curvature = draw.one_of([None, 1.5 * scale**2])

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.A.shape[1])

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"data": 0.5 * (y @ self.A.mT - x @ self.B.mT).square().sum(1)}


def least(draw: Draw) -> DrawnProblem:
    frame = objective_frame(draw)
    condition, scale = draw.power(0, 4 if draw.chance(0.1) else 2), draw.power(-1.5, 1.5)
    problem = Least(draw, frame, condition, scale).double()

    def slope(w: Weights, x: Tensor, y: Tensor) -> Tensor:
        return (y @ w["A"].T - x @ w["B"].T) @ w["A"]

    def distance(w: Weights) -> float:
        squares = torch.linalg.svdvals(w["A"]).square()
        return float((1 + squares.max()) / squares.min())

    equations = objective_equations(
        frame, slope, lambda w, x: (x.abs() @ w["B"].abs().T @ w["A"].abs()).norm(dim=1), (frame.states,), distance
    )
    name = f"own least condition={condition:.3g} scale={scale:.3g} {frame.activation} curvature={problem.curvature}"
    return drawn_objective(name, problem, equations, (frame.inputs,))


SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "Huber": lambda u: u.clamp(-1, 1),
    "Gaussian": lambda u: u * torch.exp(-u.square() / 2),
    "Student": lambda u: u / (1 + u.square()),
    "GemanMcClure": lambda u: u / (1 + u.square()).square(),
}
CONCAVITY = {"Huber": 0.0, "Gaussian": 2 * math.exp(-1.5), "Student": 1 / 8, "GemanMcClure": 1 / 4}


class Robust(opteq.Objective):
    """``1/2 |y - B x|^2 + strength sum psi(K y)``; not convex where the strength is large."""

    def __init__(self, draw: Draw, frame: Frame, kind: str, strength: float) -> None:
        super().__init__()
        self.B = nn.Parameter(draw.normal(frame.states, frame.inputs))
        self.K = nn.Parameter(draw.normal(frame.features, frame.states))
        self.K.data.div_(oracle.norm(self.K.detach()))
        self.potential = getattr(potentials, kind)(scale=draw.power(-1, 1), learned=True)
        self.strength = strength
        self.penalty = None if frame.activation == "identity" else frame.activation

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.K.shape[1])

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        prior = self.potential(y @ self.K.mT).sum(1)
        return {"data": 0.5 * (y - x @ self.B.mT).square().sum(1), "prior": self.strength * prior}


def robust(draw: Draw) -> DrawnProblem:
    frame, kind = objective_frame(draw), draw.one_of(list(SLOPES))
    if kind == "Huber":  # whose kinks are in K y: no others beside them
        frame = dataclasses.replace(frame, activation=draw.one_of(["identity", "tanh", "softplus"]))
    strength = draw.number(0.1, 0.9) / max(CONCAVITY[kind], 0.5) * draw.one_of([1, 1, 5])
    problem = Robust(draw, frame, kind, strength).double()

    def slope(w: Weights, x: Tensor, y: Tensor) -> Tensor:
        s = w["potential.log_scale"].exp()
        return y - x @ w["B"].T + strength * s * SLOPES[kind](y @ w["K"].T / s) @ w["K"]

    def distance(w: Weights) -> float | None:
        m = 1 - strength * CONCAVITY[kind]
        return (2 + strength) / m if m > 0 else None

    # Where K y is far beyond s, the force is a small number made of large ones.
    equations = objective_equations(
        frame, slope, lambda w, x: (x.abs() @ w["B"].abs().T).norm(dim=1), (frame.states,), distance
    )
    if kind == "Huber":
        equations = dataclasses.replace(
            equations,
            inside=lambda w, x, y: (y[0] @ w["K"].T / w["potential.log_scale"].exp(),),
            kinks=(-1.0, 1.0),
        )
    return drawn_objective(f"own robust {kind} {strength:.3g} {frame.activation}", problem, equations, (frame.inputs,))


class Wells(opteq.Objective):
    """``a/4 sum (y^2 - 1)^2 + c/2 |y|^2 - <B x, y>``: where a is larger than c, zero is a maximum without input."""

    def __init__(self, draw: Draw, frame: Frame, a: float, c: float) -> None:
        super().__init__()
        self.B = nn.Parameter(draw.normal(frame.states, frame.inputs))
        self.a, self.c = a, c

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.B.shape[0])

    def terms(self, y: Tensor, x: Tensor) -> dict[str, Tensor]:
        wells = self.a / 4 * (y.square() - 1).square().sum(1)
        return {"wells": wells + self.c / 2 * y.square().sum(1), "pull": -(y * (x @ self.B.mT)).sum(1)}


def wells(draw: Draw) -> DrawnProblem:
    frame = dataclasses.replace(Frame.drawn(draw, images=0), activation="identity")
    a, c = draw.number(0.1, 3), draw.number(0, 3)
    problem = Wells(draw, frame, a, c).double()

    def slope(w: Weights, x: Tensor, y: Tensor) -> Tensor:
        return a * y * (y.square() - 1) + c * y - x @ w["B"].T

    def distance(w: Weights) -> float | None:
        return None

    equations = objective_equations(
        frame, slope, lambda w, x: (x.abs() @ w["B"].abs().T).norm(dim=1), (frame.states,), distance
    )
    return drawn_objective(f"own wells a={a:.3g} c={c:.3g}", problem, equations, (frame.inputs,))


def restoration(draw: Draw) -> DrawnProblem:
    """Denoising with a prior of filter responses; its weights are taken as the library settles them.

    A guide, where there is one, is a plain network of the input: the equations take its answer in float64.
    """
    size = (draw.whole(2, 5), draw.whole(2, 5))
    kind, channels = draw.one_of(list(SLOPES)), draw.whole(1, 3)
    frame = Frame(True, 1, channels, 1, size, "identity")
    chain = op.ConvChain((1, 2, channels), kernel_size=3)
    levels = NoiseLevels(channels)
    for weight in (*chain.parameters(), levels.log_scale, levels.log_weight):
        weight.data.copy_(draw.normal(*weight.shape) * (0.3 if weight.ndim == 2 else 1))
    margin, strength, sigma = draw.power(-2, -0.3), draw.number(0.2, 1.0), draw.power(-2, -0.5)
    guide = Guide(channels, width=2, depth=1) if draw.chance(0.3) else None
    for weight in [] if guide is None else guide.parameters():
        weight.data.copy_(0.3 * draw.normal(*weight.shape))
    prior = FilterPrior(chain, getattr(potentials, kind)(), levels, margin, guide)
    problem = Restoration(prior, strength=strength, sigma=sigma).double()

    def more() -> Weights:
        with torch.no_grad():
            bound = prior.bind(levels.log_scale.new_tensor([sigma]))
            found = {"kernel": bound.filters.composed_kernel(), "scale": bound.scale, "weight": bound.weight}
        return {name: tensor.double().cpu() for name, tensor in found.items()}

    def guided(x: Tensor) -> tuple[Tensor | float, Tensor | float]:
        """By how much terms weigh, and the responses that they expect, in units of the scale."""
        if guide is None:
            return 1.0, 0.0
        found: tuple[Tensor, Tensor] = settled_guide()(x, x.new_full((len(x),), sigma))
        return found

    @functools.cache
    def settled_guide() -> nn.Module:  # at its first use, which is after weights got their dtype
        return copy.deepcopy(guide).double().cpu().requires_grad_(False)

    def responses(w: Weights, x: Tensor, y: Tensor) -> Tensor:
        return oracle.forward(w["kernel"], y) / w["scale"] - guided(x)[1]

    def slope(w: Weights, x: Tensor, y: Tensor) -> Tensor:
        force = w["weight"] * w["scale"] * guided(x)[0] * SLOPES[kind](responses(w, x, y))
        return y - x + strength * oracle.backward(w["kernel"], force)

    def size_of(w: Weights, x: Tensor) -> Tensor:
        seen = x.reshape(len(x), -1).norm(dim=1)
        expected = guided(x)[1]
        if not isinstance(expected, Tensor):
            return seen
        # A guide's answer is a sum over some tens of products, of which large ones may cancel.
        return 30 * (seen + (w["scale"] * expected).reshape(len(x), -1).norm(dim=1))

    def distance(w: Weights) -> float:
        return (2 + strength * float(w["weight"].max()) * oracle.norm(w["kernel"], size) ** 2) / margin

    equations = objective_equations(frame, slope, size_of, (1, *size), distance)
    if kind == "Huber":
        equations = dataclasses.replace(equations, inside=lambda w, x, y: (responses(w, x, y[0]),), kinks=(-1.0, 1.0))
    led = "" if guide is None else " guided"
    name = f"own restoration {kind}{led} margin={margin:.3g} strength={strength:.3g} sigma={sigma:.3g}"
    return dataclasses.replace(drawn_objective(name, problem, equations, (1, *size)), more=more)
