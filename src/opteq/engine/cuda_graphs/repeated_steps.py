"""Steps that repeat: an iteration whose state has fixed addresses, so that one captured graph serves all of them.

A graph that holds every step of a solve is too large where thousands are allowed. After a few steps a solver changes
nothing but tensors: what it does in the next steps is the same, up to a period where it writes to a ring of columns.
One period is captured. It reads the state from buffers, and at its end copies the new state there. On the device it
runs again as long as a row is unfinished.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from opteq.engine.cuda_graphs.operations import UncapturableError, WithOperations
from opteq.solvers.loop import Iteration, Loop

FIRST_STEPS = 16
"""Steps after which rings of columns are full, and what was set up at the first ones is there."""

_LONGEST_PERIOD = 8


def plain_loop(iteration: Iteration) -> Loop:
    """The loop inside; its kernels in Triton count steps on the host, so that none of theirs repeats."""
    inner = iteration.inner if isinstance(iteration, WithOperations) else iteration
    if not isinstance(inner, Loop):
        raise UncapturableError(f"the steps of {type(inner).__name__} do not repeat")
    return inner


def find_period(iteration: Iteration) -> int:
    """After how many steps an iteration that has begun changes nothing but tensors; it is advanced on the way."""
    loop = plain_loop(iteration)
    for _ in range(FIRST_STEPS):
        iteration.advance()
    loop.trace = loop.trace[-1:]
    form = _form(loop)
    for period in range(1, _LONGEST_PERIOD + 1):
        iteration.advance()
        loop.trace = loop.trace[-1:]
        if _form(loop) == form:
            return period
    raise UncapturableError(f"the steps of {type(loop.process).__name__} do not repeat")


class RepeatedSteps:
    """An iteration with its state in buffers.

    Args:
        iteration: it has taken ``taken`` steps, at least :data:`FIRST_STEPS`.
        taken: the number of steps, which differs from the most that are allowed by a multiple of ``period``.
        period: steps of one :meth:`advance`.
        history: where residuals are written, ``(max_steps + 1, R)``.
    """

    def __init__(self, iteration: Iteration, taken: int, period: int, history: Tensor) -> None:
        self.iteration = iteration
        self.loop = plain_loop(iteration)
        self.period = period
        self.history = history
        self.loop.trace = self.loop.trace[-1:]
        self.buffers: list[Tensor] = []
        _replace(self.loop, self._buffer)
        self.taken = torch.full((), taken, dtype=torch.int64, device=history.device)
        self.places = torch.arange(1, period + 1, device=history.device)
        self.flags = iteration.unfinished().to(torch.int32)  # which rows go on

    def advance(self) -> None:
        """One period, from the buffers to the buffers."""
        for _ in range(self.period):
            self.iteration.advance()
        self.history.index_copy_(0, self.taken + self.places, torch.stack(self.loop.trace[-self.period :]))
        self.loop.trace = self.loop.trace[-1:]
        self.taken.add_(self.period)
        self._keep()
        self.flags.copy_(self.iteration.unfinished() & (self.taken < self.iteration.rule.max_steps))

    def _buffer(self, tensor: Tensor) -> Tensor:
        self.buffers.append(tensor.clone())
        return self.buffers[-1]

    def _keep(self) -> None:
        """Copy the state to its buffers, and let the iteration go on from there."""
        found: list[Tensor] = []

        def buffer(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return self.buffers[len(found) - 1]

        _replace(self.loop, buffer)
        memory = {own.untyped_storage().data_ptr() for own in self.buffers}
        # A tensor of the new state may lie in the buffer of another one, which is about to be overwritten.
        safe = [
            tensor if tensor is own or tensor.untyped_storage().data_ptr() not in memory else tensor.clone()
            for own, tensor in zip(self.buffers, found, strict=True)
        ]
        for own, tensor in zip(self.buffers, safe, strict=True):
            if tensor is not own:
                own.copy_(tensor)


def _is_solver_part(value: object) -> bool:
    return type(value).__module__.startswith("opteq.solvers") and hasattr(value, "__dict__")


def _replace(value: Any, replacement: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with other tensors: tuples and lists are made anew, parts of solvers are changed in place."""
    if isinstance(value, Tensor):
        return replacement(value)
    if isinstance(value, tuple | list):
        parts = [_replace(part, replacement) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if _is_solver_part(value):
        for name, part in list(vars(value).items()):
            new = _replace(part, replacement)
            if new is not part:
                object.__setattr__(value, name, new)
    return value


def _form(value: Any) -> Hashable:
    """All but the values of tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, tuple | list):
        return type(value), *(_form(part) for part in value)
    if _is_solver_part(value):
        return type(value), *((name, _form(part)) for name, part in vars(value).items())
    return value  # type: ignore[no-any-return]  # a number or a function, which are compared as they are
