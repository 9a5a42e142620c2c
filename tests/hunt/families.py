"""The families of the library with their equations: OptEq, Deep OptEq, POptEq, MOptEq (with kernels, too) and GEQ."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

import opteq
from hunt import oracle
from hunt.drawing import Draw
from hunt.oracle import Equations, State, Weights
from hunt.parts import DrawnProblem, Frame, drawn_injection, drawn_operator, injected, injected_size
from opteq import kernels
from opteq.models.blocks.kernel_mopteq import KernelMOptEq


def opteq_layer(draw: Draw) -> DrawnProblem:
    """``y = sigma(W W'y / mu + c)``."""
    frame = Frame.drawn(draw)
    mu = draw.one_of([1.0, 1.0, 0.5, 3.0])
    expands = frame.activation in oracle.BOUNDED and draw.chance(0.1)
    most = math.sqrt(mu / frame.slope) * (1.2 if expands else 0.97)
    W = drawn_operator(draw, frame, frame.features, frame.states, frame.size, most)
    bare = draw.chance(0.3)
    U = None if bare else drawn_injection(draw, frame, frame.inputs, frame.states)

    def inside(w: Weights, x: Tensor, y: State) -> State:
        z = oracle.backward(w["W.weight"], y[0]) / mu
        return (oracle.forward(w["W.weight"], z) + injected(w, "", x),)

    equations = Equations(
        inside,
        lambda w, x, y: (frame.sigma(inside(w, x, y)[0]),),
        lambda w, x, y: (oracle.backward(w["W.weight"], y[0]) / mu,),
        [(frame.states, *frame.size)],
        frame.kinks,
        lambda w: frame.slope * oracle.norm(w["W.weight"], frame.size) ** 2 / mu,
        lambda w, x: injected_size(w, "", x),
    )
    problem = opteq.OptEq(W, U, frame.activation, mu)
    shape = (frame.states if bare else frame.inputs, *frame.size)
    return DrawnProblem(f"opteq {frame.activation} mu={mu} {W} U={U}", problem, equations, shape)


def deep_layers(draw: Draw) -> DrawnProblem:
    """``z <- alpha W' sigma(W z + c) / mu + (1 - alpha) z``, layer by layer."""
    frame = Frame.drawn(draw)
    mu, count = draw.one_of([1.0, 2.0]), draw.whole(1, 3)
    alphas = [draw.number(0.2, 1.0) for _ in range(count)]
    layers = []
    for index in range(count):
        states = draw.whole(1, 5)
        W = drawn_operator(draw, frame, frame.features, states, frame.size, 0.95 * math.sqrt(mu / frame.slope))
        sees = index == 0 or draw.chance(0.7)
        layers.append((W, drawn_injection(draw, frame, frame.inputs, states) if sees else None))

    def sweep(w: Weights, x: Tensor, z: Tensor) -> tuple[Tensor, list[Tensor]]:
        seen = []
        for index, alpha in enumerate(alphas):
            weight = w[f"layers.{index}.W.weight"]
            t = oracle.forward(weight, z)
            if f"layers.{index}.U.weight" in w:
                t = t + injected(w, f"layers.{index}.", x)
            seen.append(t)
            z = alpha * oracle.backward(weight, frame.sigma(t)) / mu + (1 - alpha) * z
        return z, seen

    def contraction(w: Weights) -> float:
        norms = [oracle.norm(w[f"layers.{index}.W.weight"], frame.size) for index in range(count)]
        return math.prod(1 - a + a * frame.slope * n**2 / mu for a, n in zip(alphas, norms, strict=True))

    equations = Equations(
        lambda w, x, y: tuple(sweep(w, x, y[0])[1]),
        lambda w, x, y: (sweep(w, x, y[0])[0],),
        lambda w, x, y: y,
        [(frame.features, *frame.size)],
        frame.kinks,
        contraction,
        lambda w, x: sum(injected_size(w, f"layers.{i}.", x) for i in range(count) if f"layers.{i}.U.weight" in w),
    )
    problem = opteq.DeepOptEq(layers, alphas, frame.activation, mu)
    name, shape = f"deep {count} {frame.activation} mu={mu} alphas={alphas}", (frame.inputs, *frame.size)
    return DrawnProblem(name, problem, equations, shape, minimises=False)


def kernel_branches(draw: Draw) -> DrawnProblem:
    """MOptEq that sees the input through a kernel of an inner product."""
    return branches(draw, draw.one_of(["linear", "sigmoid", "polynomial"]))


def branches(draw: Draw, kind: str = "") -> DrawnProblem:
    """POptEq, or MOptEq: with heritage, with a smoothed diversity, with both or without heritage; or with a kernel."""
    degree = draw.whole(2, 3) if kind else 0
    frame = Frame.drawn(draw)
    count = draw.whole(1, 3)
    scales = [draw.one_of([1, 2]) if frame.images else 1 for _ in range(count)]
    sizes = [tuple(side // scale for side in frame.size) for scale in scales]
    tied = bool(kind) or draw.chance(0.7)
    heritage = draw.chance(0.7)
    diversity = draw.one_of([0.0, 0.02, 0.1]) if tied else 0.0
    smoothing = draw.number(0.3, 3.0)
    parts, states = [], []
    for scale, size in zip(scales, sizes, strict=True):
        states.append(draw.whole(1, 5))
        most = 0.95 / math.sqrt(frame.slope * (1 + diversity * (frame.features - 1)))
        W = drawn_operator(draw, frame, frame.features, states[-1], size, most)
        parts.append(opteq.Branch(W, drawn_injection(draw, frame, frame.inputs, states[-1]), scale))

    def fused(z: list[Tensor]) -> list[Tensor]:
        """``-grad E`` by autograd."""
        energy = partial(_ring_energy, diversity=diversity, smoothing=smoothing, heritage=heritage)
        return [-slope for slope in torch.func.grad(energy)(tuple(z))] if tied else z

    def inside(w: Weights, x: Tensor, y: State) -> State:
        z = [oracle.backward(w[f"branches.{i}.W.weight"], part) for i, part in enumerate(y)]
        shares = [injected(w, f"branches.{i}.", oracle.pooled(x, scale)) for i, scale in enumerate(scales)]
        if kind:
            shares = [_by_kernel(kind, degree, c, part) for c, part in zip(shares, y, strict=True)]
        return tuple(
            oracle.forward(w[f"branches.{i}.W.weight"], h) + c
            for i, (h, c) in enumerate(zip(fused(z), shares, strict=True))
        )

    def contraction(w: Weights) -> float | None:
        norms = [oracle.norm(w[f"branches.{i}.W.weight"], size) for i, size in enumerate(sizes)]
        known = kind in ("", "linear") and not (diversity and frame.features > 1)
        return frame.slope * max(norms) ** 2 if known else None

    equations = Equations(
        inside,
        lambda w, x, y: tuple(frame.sigma(t) for t in inside(w, x, y)),
        lambda w, x, y: tuple(oracle.backward(w[f"branches.{i}.W.weight"], part) for i, part in enumerate(y)),
        [(n, *size) for n, size in zip(states, sizes, strict=True)],
        frame.kinks,
        contraction,
        lambda w, x: sum(
            injected_size(w, f"branches.{i}.", oracle.pooled(x.abs(), scale)) for i, scale in enumerate(scales)
        ),
    )
    options: dict[str, Any] = {"activation": frame.activation, "smoothing": smoothing if diversity else 0.0}
    if tied:
        problem = (
            KernelMOptEq(parts, _kernel(kind, degree), diversity, heritage=heritage, **options)
            if kind
            else opteq.MOptEq(parts, diversity, heritage=heritage, **options)
        )
        given = f"kernel-mopteq {kind} degree={degree}" if kind else "mopteq"
        name = f"{given} diversity={diversity} smoothing={smoothing:.3g} heritage={heritage}"
    else:
        problem, name = opteq.POptEq(parts, frame.activation), "popteq"
    return DrawnProblem(f"{name} {frame.activation} scales={scales}", problem, equations, (frame.inputs, *frame.size))


def _ring_energy(ring: tuple[Tensor, ...], diversity: float, smoothing: float, heritage: bool) -> Tensor:
    """The energy of branches on a ring, as it is printed."""
    total = torch.zeros((), dtype=torch.float64)
    for index, one in enumerate(ring):
        other = oracle.resized(ring[(index + 1) % len(ring)], tuple(one.shape[2:]))
        a, b = one.reshape(len(one), one.shape[1], -1), other.reshape(len(one), one.shape[1], -1)
        products = a @ b.transpose(1, 2)
        off = products - torch.diag_embed(products.diagonal(dim1=1, dim2=2))
        mask = 1 - torch.eye(products.shape[1], dtype=torch.float64)
        spread = (torch.hypot(off, torch.full_like(off, smoothing)) * mask).sum()
        total = total + diversity * spread / 2 - ((a * b).sum() if heritage else one.square().sum()) / 2
    return total


def similarity(draw: Draw) -> DrawnProblem:
    """GEQ with its four kernels."""
    frame = Frame.drawn(draw)
    kind = draw.one_of(["linear", "gaussian", "sigmoid", "polynomial"])
    gamma, degree = draw.power(-2, 0.5), draw.whole(2, 3)
    W = drawn_operator(draw, frame, frame.states, frame.features, frame.size, 0.97 / math.sqrt(frame.slope))
    seen = frame.features if kind == "gaussian" else frame.states
    U = drawn_injection(draw, frame, frame.inputs, seen)

    def inside(w: Weights, x: Tensor, y: State) -> State:
        weight, c, state = w["W.weight"], injected(w, "", x), y[0]
        if kind == "gaussian":
            r = c - oracle.forward(weight, state)
            e = torch.exp(-gamma * r.square().reshape(len(r), -1).sum(1))
            return (oracle.backward(weight, e.reshape(-1, *[1] * (r.ndim - 1)) * r),)
        around = oracle.backward(weight, oracle.forward(weight, state))
        return (around + _by_kernel(kind, degree, c, state),)

    def contraction(w: Weights) -> float | None:
        if kind not in ("linear", "gaussian"):
            return None
        return frame.slope * oracle.norm(w["W.weight"], frame.size) ** 2

    equations = Equations(
        inside,
        lambda w, x, y: (frame.sigma(inside(w, x, y)[0]),),
        lambda w, x, y: y,
        [(frame.states, *frame.size)],
        frame.kinks,
        contraction,
        lambda w, x: injected_size(w, "", x),
    )
    kernel = kernels.Gaussian(gamma) if kind == "gaussian" else _kernel(kind, degree)
    problem = opteq.GEQ(W, U, kernel, frame.activation)
    name = f"geq {kind} gamma={gamma:.3g} degree={degree} {frame.activation}"
    return DrawnProblem(name, problem, equations, (frame.inputs, *frame.size))


def _kernel(kind: str, degree: int) -> kernels.InnerProduct:
    """A kernel k of the inner product of the input's share and the state."""
    made = {"linear": kernels.Linear, "sigmoid": kernels.Sigmoid, "polynomial": lambda: kernels.Polynomial(degree)}
    return made[kind]()


def _by_kernel(kind: str, degree: int, c: Tensor, state: Tensor) -> Tensor:
    """``k'(<c, y>) c``."""
    if kind == "linear":
        return c
    t = (c * state).reshape(len(c), -1).sum(1)
    slope = 1 - torch.tanh(t).square() if kind == "sigmoid" else degree * t ** (degree - 1)
    return slope.reshape(-1, *[1] * (c.ndim - 1)) * c
