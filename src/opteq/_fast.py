"""The switch between the fast paths, fused kernels and CUDA graphs, and the plain ones with the same results."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Settings:
    """Which fast paths may be taken.

    Attributes:
        fused: Triton kernels for solver steps and resampling on a GPU; on a CPU, solves that reuse and round products.
        graphs: CUDA graphs of several solver steps.
        forks: captured solves whose end the device finds, not the host, where the driver can do that.
        looking: on a CPU, look at values on the way where that saves copies; a GPU would have to wait.
        bounds: Triton kernels for the bounds of wide operators on a GPU, in half precision with bounds on its errors.
        keeping: keep what was computed on the way where it may be of use again. Not in a part of a captured solve that
            may be left out when it is replayed: who found it kept would read what nobody has computed.
        recording: whether a solve is captured at the moment, of which every part is made anew.
        interpreted: take the fused path on a CPU too, where Triton's interpreter runs the kernels: for tests.
    """

    fused: bool = True
    graphs: bool = True
    forks: bool = True
    looking: bool = True
    bounds: bool = True
    keeping: bool = True
    recording: bool = False
    interpreted: bool = False


settings = Settings()


@contextmanager
def fast_paths(*, fused: bool | None = None, graphs: bool | None = None, bounds: bool | None = None) -> Iterator[None]:
    """Allow or forbid the fast paths for a while; what is not named stays as it is.

    All are on by default: ``fused`` kernels for solver steps, CUDA ``graphs``, kernels for the ``bounds`` of operators.

    Answers agree to rounding with and without them, on a CPU to the tolerance, and gradients to theirs. Forbidding them
    helps to find out where a difference comes from, and lets a debugger see every step.

    >>> import opteq
    >>> with opteq.fast_paths(fused=False, graphs=False):
    ...     pass  # every layer called here takes the plain path
    """
    before = settings.fused, settings.graphs, settings.bounds
    settings.fused = settings.fused if fused is None else fused
    settings.graphs = settings.graphs if graphs is None else graphs
    settings.bounds = settings.bounds if bounds is None else bounds
    try:
        yield
    finally:
        settings.fused, settings.graphs, settings.bounds = before


@functools.cache
def has_triton() -> bool:
    """Whether fused kernels can be compiled at all; where they cannot, one warning says so for all of them."""
    if importlib.util.find_spec("triton") is not None:
        return True
    warnings.warn(
        "Triton is not installed, so solves on a GPU take more kernels, and longer, than they need", stacklevel=2
    )
    return False
