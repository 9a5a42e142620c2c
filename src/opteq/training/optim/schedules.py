"""Learning-rate schedules as functions of the step, without state."""

from __future__ import annotations

import math
from collections.abc import Callable

from opteq.training.recipe.sections import ScheduleSection

Schedule = Callable[[int], float]
"""From the step index (from 0) to the factor of the peak learning rate."""


def schedule(options: ScheduleSection, steps_per_epoch: int, epochs: int) -> Schedule:
    """The factor of the learning rate at every step of a run.

    - ``constant``: 1.
    - ``step``: multiplied by ``factor`` at each of ``milestones``, or every ``every`` epochs.
    - ``cosine``: from 1 to ``final`` along half a cosine.
    - ``poly``: ``(1 - step / steps)`` to the ``power``, from 1 to nearly 0.
    - ``one-cycle``: from ``start`` to 1 in the fraction ``rise`` of the run, then to ``final``, each along half a
      cosine (Smith and Topin's schedule, without cycling the momentum).

    All but one-cycle start with a linear warm-up over ``warmup`` epochs.

    >>> halved = schedule(ScheduleSection(name="step", every=2, factor=0.5), steps_per_epoch=10, epochs=6)
    >>> [halved(step) for step in (0, 19, 20, 40)]
    [1.0, 1.0, 0.5, 0.25]
    """
    total = max(steps_per_epoch * epochs, 1)
    warmup = options.warmup * steps_per_epoch

    def one_cycle(step: int) -> float:
        turn = max(options.rise * total - 1, 1.0)
        if step <= turn:
            return _between(options.start, 1.0, step / turn)
        return _between(1.0, options.final, (step - turn) / max(total - 1 - turn, 1.0))

    def cosine(step: int) -> float:
        return _between(1.0, options.final, (step - warmup) / max(total - 1 - warmup, 1.0))

    def poly(step: int) -> float:
        return float(max(1 - (step - warmup) / max(total - warmup, 1.0), 0.0) ** options.power)

    def in_steps(step: int) -> float:
        epoch = step // steps_per_epoch
        passed = epoch // options.every if options.every else sum(epoch >= one for one in options.milestones)
        return float(options.factor**passed)

    if options.name == "one-cycle":
        return one_cycle
    moves = {"step": in_steps, "cosine": cosine, "poly": poly}.get(options.name)

    def with_warmup(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 1.0 if moves is None else moves(step)

    return with_warmup


def _between(first: float, last: float, share: float) -> float:
    share = min(max(share, 0.0), 1.0)
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2
