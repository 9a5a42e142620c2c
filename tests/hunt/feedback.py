"""Inhibition alone and beside OptEq's term, and maps ``z = f(z, x)`` that are written freely."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

import opteq
from hunt import oracle
from hunt.drawing import Draw
from hunt.oracle import Equations, State, Weights
from hunt.own import drawn_objective, objective_equations, objective_frame
from hunt.parts import DrawnProblem, Frame, drawn_injection, drawn_operator, injected, injected_size


def inhibition(draw: Draw) -> DrawnProblem:
    """``min sum f(y) + m/2 |y|^2 + 1/2 |A'y|^2 - <U x + b, y>``."""
    frame = Frame.drawn(draw)
    frame = dataclasses.replace(frame, activation=objective_frame(draw).activation)
    m = draw.power(-2, 0)
    A = drawn_operator(draw, frame, frame.features, frame.states, frame.size, draw.power(-1, 1))
    problem = opteq.Inhibition(A, drawn_injection(draw, frame, frame.inputs, frame.states), m, frame.activation)

    def slope(w: Weights, x: Tensor, y: Tensor) -> Tensor:
        around = oracle.forward(w["A.weight"], oracle.backward(w["A.weight"], y))
        return m * y + around - injected(w, "", x)

    def distance(w: Weights) -> float:
        return (1 + m + oracle.norm(w["A.weight"], frame.size) ** 2) / m

    equations = objective_equations(
        frame, slope, lambda w, x: injected_size(w, "", x), (frame.states, *frame.size), distance
    )
    return drawn_objective(f"inhibition m={m:.3g} {frame.activation}", problem, equations, (frame.inputs, *frame.size))


def inhibited(draw: Draw) -> DrawnProblem:
    """``min sum f(y) + m/2 |y|^2 - 1/(2 mu) |W'y|^2 + 1/2 |A'y|^2 - <U x + b, y>``."""
    frame = Frame.drawn(draw)
    frame = dataclasses.replace(frame, activation=objective_frame(draw).activation)
    m, mu = draw.power(-1, 0), draw.one_of([1.0, 2.0])
    W = drawn_operator(draw, frame, frame.features, frame.states, frame.size, 0.95 * math.sqrt(m * mu))
    A = drawn_operator(draw, frame, draw.whole(1, 4), frame.states, frame.size, draw.power(-1, 1))
    inner = opteq.OptEq(W, drawn_injection(draw, frame, frame.inputs, frame.states), frame.activation, mu)

    def slope(w: Weights, x: Tensor, y: Tensor) -> Tensor:
        excited, inhibits = w["problem.W.weight"], w["A.0.weight"]
        around = oracle.forward(inhibits, oracle.backward(inhibits, y))
        return m * y + around - oracle.forward(excited, oracle.backward(excited, y)) / mu - injected(w, "problem.", x)

    def distance(w: Weights) -> float:
        most = m + oracle.norm(w["A.0.weight"], frame.size) ** 2
        return (1 + most) / (m - oracle.norm(w["problem.W.weight"], frame.size) ** 2 / mu)

    shape = (frame.states, *frame.size)
    equations = objective_equations(frame, slope, lambda w, x: injected_size(w, "problem.", x), shape, distance)
    equations = dataclasses.replace(
        equations, features=lambda w, x, y: (oracle.backward(w["problem.W.weight"], y[0]) / mu,)
    )
    name = f"inhibited m={m:.3g} mu={mu} {frame.activation} {W} {A}"
    return drawn_objective(name, opteq.Inhibited(inner, A, m), equations, (frame.inputs, *frame.size))


class FreeMap(nn.Module):
    """``tanh(K z + B x)``, with no symmetry."""

    def __init__(self, draw: Draw, frame: Frame, rate: float) -> None:
        super().__init__()
        K = draw.normal(frame.states, frame.states)
        self.K = nn.Parameter(K * rate / oracle.norm(K))
        self.B = nn.Parameter(draw.normal(frame.states, frame.inputs) / math.sqrt(frame.inputs))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.K.mT + x @ self.B.mT)


def free_map(draw: Draw) -> DrawnProblem:
    frame, rate = Frame.drawn(draw, images=0), draw.number(0.1, 0.97)
    problem = opteq.FixedPoint(FreeMap(draw, frame, rate), start=lambda x: x.new_zeros(len(x), frame.states)).double()

    def inside(w: Weights, x: Tensor, y: State) -> State:
        return (y[0] @ w["f.K"].T + x @ w["f.B"].T,)

    equations = Equations(
        inside,
        lambda w, x, y: (torch.tanh(inside(w, x, y)[0]),),
        lambda w, x, y: y,
        [(frame.states,)],
        (),
        lambda w: oracle.norm(w["f.K"]),
        lambda w, x: (x.abs() @ w["f.B"].abs().T).norm(dim=1),
    )
    return DrawnProblem(f"free map rate={rate:.3g}", problem, equations, (frame.inputs,), minimises=False)
