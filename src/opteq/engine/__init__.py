"""Fast implementations, behind one interface.

The library can compute everything without this package. At three places it calls it for a faster implementation: to
solve a bound problem (:func:`solve`), to make its solution differentiable (:func:`differentiate`), and to compute the
bounded weights of a module (:func:`bounded_weights`). None means that there is no fast path, and the plain path runs.
Nothing else in the library imports from here, as a test checks.

There are two backends, modules with the first two of these functions. Both flatten a problem into its tensors and
its structure. :mod:`opteq.engine.cuda_graphs` captures solves and backward passes of any problem, built-in or
user-written, as CUDA graphs, and replays them. :mod:`opteq.engine.cpu` traces user-written objectives, and solves with
the graphs instead of autograd. Results agree with the plain path to the tolerance of the solve. :func:`report` says
which path a call takes, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from opteq.engine.settings import settings

if TYPE_CHECKING:
    from torch import nn

    from opteq.problems.hidden import BoundMap
    from opteq.solution import Report
    from opteq.solvers import Outcome, Solver
    from opteq.solvers.linear import LinearSolver
    from opteq.states import State

_counting = Lock()

__all__ = ["bounded_weights", "differentiate", "forget", "off", "report", "settings", "solve", "trace_at_once"]


@contextmanager
def off() -> Iterator[None]:
    """Run everything on the plain path, on CPU and GPU, in all threads, while any thread is inside.

    The switch is global: on a GPU torch runs backward passes, and forward passes that a checkpoint repeats, in its own
    threads, which inherit neither thread-local values nor context variables.

    >>> import opteq
    >>> with opteq.engine.off():
    ...     pass  # every layer called here takes the plain path
    """
    with _counting:
        settings.offs += 1
    try:
        yield
    finally:
        with _counting:
            settings.offs -= 1


@contextmanager
def trace_at_once() -> Iterator[None]:
    """Trace a user's objective on a CPU at its first call; else few calls are not worth it, and run plainly.

    Traced functions round otherwise than plain ones: inside, a program that is resumed repeats its numbers.
    """
    before, settings.calls_before_tracing = settings.calls_before_tracing, 0
    try:
        yield
    finally:
        settings.calls_before_tracing = before


def solve(hidden: BoundMap, solver: Solver, start: State | None, same_steps: bool = False) -> Outcome | None:
    """The equilibrium of a bound problem, without autograd; None where the plain path should solve it."""
    answers = (backend.solve(hidden, solver, start, same_steps) for backend in _backends())
    return next((answer for answer in answers if answer is not None), None)


def differentiate(
    hidden: BoundMap, state: State, outcome: Outcome, linear: LinearSolver, record: Callable[[Report], None]
) -> tuple[State, Outcome] | None:
    """``state``, and its features in ``outcome``, with the implicit gradient attached; None for the plain path.

    Args:
        hidden: the problem with its input bound.
        state: its equilibrium, a constant.
        outcome: the outcome of its solve.
        linear: the linear solver of the backward pass.
        record: called with the report of the backward pass.
    """
    answers = (backend.differentiate(hidden, state, outcome, linear, record) for backend in _backends())
    return next((answer for answer in answers if answer is not None), None)


def bounded_weights(module: nn.Module) -> AbstractContextManager[None]:
    """A context in which bounds of the operators inside ``module`` are computed together, where that is faster."""
    graphs = _backends()[:-1]  # not on a CPU
    return (graphs[0].bounded_weights(module) if graphs else None) or nullcontext()


def report(layer: Any, x: Any) -> str:
    """Which path ``layer(x)`` takes, forward and backward, and why, in one line each.

    A copy of the layer is called a few times, as in training, so that captures have happened.
    """
    from opteq.engine.log import describe

    return describe(layer, x)


def forget() -> None:
    """Drop everything that was captured or traced, and the memory that it holds."""
    from opteq.engine import traced

    traced.kept.clear()
    if len(_backends()) > 1:
        from opteq.engine.cuda_graphs import bounds, cache

        cache.forget()
        bounds.forget()


def _backends() -> Sequence[ModuleType]:
    """The backends in force: CUDA graphs where there is a device for them, and traced objectives on a CPU."""
    if settings.offs:
        return ()
    import torch

    from opteq.engine import cpu

    if not (torch.cuda.is_available() and torch.version.cuda):
        return (cpu,)
    from opteq.engine.cuda_graphs import backend

    return backend, cpu
