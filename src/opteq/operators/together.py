"""The bounds of many operators at once: a GPU computes them side by side, in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from opteq.operators.base import Operator
from opteq.operators.captured import in_one_launch
from opteq.operators.norms import known_scales, scale_job


@contextmanager
def bounded_together(module: nn.Module) -> Iterator[None]:
    """While this is in force, operators inside ``module`` take their bounds from one computation for all of them.

    Bounds are chains of small operations, which leave a GPU mostly idle; those of several branches fit beside each
    other. On other devices, and for a single operator, nothing is changed. The same numbers come out in any case.
    """
    if known_scales.get() is not None:  # a problem inside a problem: done already
        yield
        return
    bounded = [found for part in module.modules() if isinstance(part, Operator) and (found := part.bounded_by())]
    if len(bounded) < 2 or not all(weight.is_cuda for weight, *_ in bounded):
        yield
        return
    scales = in_one_launch(*(scale_job(*found) for found in bounded))
    token = known_scales.set({id(weight): (weight, scale) for (weight, *_), scale in zip(bounded, scales, strict=True)})
    try:
        yield
    finally:
        known_scales.reset(token)
