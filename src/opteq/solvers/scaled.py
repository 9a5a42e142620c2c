"""Products that take states as halves: what a linear solver that keeps them so asks of one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ScaledProduct(Protocol):
    """A product with states of float32 that are halves, every sample times a power of two.

    The power is told by a bound of the sample's entries, its top (:mod:`opteq._scale_kernels`). A product rounds its
    argument to halves anyway: one that is kept so is what is multiplied, and half as many bytes.
    """

    @property
    def in_use(self) -> bool:
        """Whether products go this way now."""
        ...

    @property
    def gain(self) -> Tensor:
        """What the tops of every sample are multiplied by, behind those that are given: ``(batch,)``."""
        ...

    def __call__(self, halves: Tensor, tops: Tensor) -> Tensor:
        """The product in float32; ``tops`` are those of all samples, and behind them those times :attr:`gain`."""
        ...
