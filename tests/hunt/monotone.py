"""monDEQ with one tier and with several: its matrix, entry by entry, and steps of splitting with dense inverses."""

from __future__ import annotations

import torch
from torch import Tensor

from hunt.drawing import Draw
from hunt.oracle import Equations, State, Weights, flat, unflat
from hunt.parts import DrawnProblem, Frame, drawn_injection, injected, injected_size
from opteq.models.comparators.monotone import MonDEQ
from opteq.models.comparators.monotone_tiers import TieredMonDEQ


def circular(kernel: Tensor, gain: Tensor, z: Tensor) -> Tensor:
    """The circular convolution of ``(B, n, h, w)`` with ``gain kernel / |kernel|``, tap by tap."""
    kernel = gain * kernel / kernel.square().sum().sqrt()
    taps = [
        torch.einsum("oi,bihw->bohw", kernel[:, :, row, column], z.roll((row, column), (2, 3)))
        for row in range(kernel.shape[2])
        for column in range(kernel.shape[3])
    ]
    return torch.stack(taps).sum(dim=0)


def minus(w: Weights, m: float, shapes: list[tuple[int, ...]]) -> Tensor:
    """``I - W`` as a matrix: ``m I + A'A`` and a skew part, A with strided convolutions below its diagonal.

    Beside its diagonal the skew part is such that no tier sees the next one.
    """
    names = [f".{tier}" for tier in range(len(shapes))] if "A.0" in w else [""]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    eye = torch.eye(sum(sizes), dtype=torch.float64)
    tiers = unflat(eye, shapes)  # what each unit vector has on each tier
    blocks_A, blocks_B = [], []
    for index, name in enumerate(names):
        image = circular(w[f"A{name}"], w[f"gain_A{name}"], tiers[index])
        if index:
            above = circular(w[f"C.{index - 1}"], w[f"gain_C.{index - 1}"], tiers[index - 1])
            image = image + above[:, :, ::2, ::2]
        blocks_A.append(image)
        blocks_B.append(circular(w[f"B{name}"], w[f"gain_B{name}"], tiers[index]))
    A, B = flat(blocks_A).T, flat(blocks_B).T
    square = A.T @ A
    bounds = torch.tensor(sizes).cumsum(0)
    tier = torch.bucketize(torch.arange(sum(sizes)), bounds, right=True)
    below, beyond = tier[:, None] > tier[None, :], tier[:, None] < tier[None, :]
    skew = torch.where(below, square, 0.0) - torch.where(beyond, square, 0.0)
    return m * eye + square + skew - B + B.T


def monotone(draw: Draw) -> DrawnProblem:
    """``z = relu(W z + U x + b)`` by both splittings."""
    tiers = draw.whole(1, 3) if draw.chance(0.5) else 1
    side = (4, 4) if tiers == 3 else (draw.one_of([2, 4]), draw.one_of([2, 4]))
    least = min(side) >> (tiers - 1)
    kernel = draw.one_of([size for size in (1, 2, 3) if size <= least])
    channels = tuple(draw.whole(1, 3) for _ in range(tiers))
    m, splitting = draw.power(-1, 0), draw.one_of(["peaceman-rachford", "forward-backward"])
    frame = Frame(True, draw.whole(1, 3), 0, channels[0], side, "relu")
    U = drawn_injection(draw, frame, frame.inputs, channels[0])
    shapes = [(n, side[0] >> tier, side[1] >> tier) for tier, n in enumerate(channels)]
    problem: MonDEQ | TieredMonDEQ
    if tiers > 1 or draw.chance(0.3):
        problem = TieredMonDEQ(channels, U, kernel, m, splitting).double()
    else:
        problem = MonDEQ(channels[0], U, kernel, m, splitting).double()
    for name, weight in problem.named_parameters():
        if not name.startswith("U."):
            weight.data.copy_(draw.normal(*weight.shape))
    weights = {name: weight.detach().clone() for name, weight in problem.named_parameters()}
    alpha = draw.power(-1, 1)
    if splitting == "forward-backward":  # steps converge below 2 m / L^2
        alpha = draw.number(0.2, 1.5) * m / float(torch.linalg.matrix_norm(minus(weights, m, shapes), 2)) ** 2
    problem.alpha = alpha

    def given(w: Weights, x: Tensor) -> Tensor:
        seen = injected(w, "", x).flatten(1)
        return torch.nn.functional.pad(seen, (0, sum(torch.Size(shape).numel() for shape in shapes[1:])))

    def inside(w: Weights, x: Tensor, y: State) -> State:
        rows = flat(y)
        if splitting == "peaceman-rachford":
            return (rows,)
        return (rows - alpha * (rows @ minus(w, m, shapes).T - given(w, x)),)

    def step(w: Weights, x: Tensor, y: State) -> State:
        (seen,) = inside(w, x, y)
        if splitting == "forward-backward":
            return unflat(seen.clamp(min=0), shapes)
        matrix = minus(w, m, shapes)
        half = 2 * seen.clamp(min=0) - seen
        system = torch.eye(len(matrix), dtype=matrix.dtype) + alpha * matrix
        solved = torch.linalg.solve(system, (half + alpha * given(w, x)).T).T
        return unflat(2 * solved - half, shapes)

    def features(w: Weights, x: Tensor, y: State) -> State:
        return (y[-1].clamp(min=0) if splitting == "peaceman-rachford" else y[-1],)

    def contraction(w: Weights) -> float:
        matrix = minus(w, m, shapes)
        eye = torch.eye(len(matrix), dtype=matrix.dtype)
        if splitting == "forward-backward":
            return float(torch.linalg.matrix_norm(eye - alpha * matrix, 2))
        return float(torch.linalg.matrix_norm(2 * torch.linalg.inv(eye + alpha * matrix) - eye, 2))

    equations = Equations(
        inside, step, features, shapes, (0.0,), contraction,
        lambda w, x: max(1.0, 2 * alpha) * injected_size(w, "", x),
    )  # fmt: skip
    kind = "monotone tiers" if isinstance(problem, TieredMonDEQ) else "monotone deq"
    name = f"{kind} {channels} kernel={kernel} m={m:.3g} {splitting} alpha={alpha:.3g}"
    return DrawnProblem(name, problem, equations, (frame.inputs, *side), minimises=False)
