"""Batches that are solved part after part: their answers as those of one solve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor


class Gathered:
    """Tensors of a whole batch, of which parts come one after the other.

    They are copied at once, so that the memory of a part serves the next one: what is fresh has to be mapped by the
    system, page by page.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.tensors: tuple[Tensor, ...] = ()

    def put(self, rows: slice, parts: Sequence[Tensor]) -> None:
        """The next part: these rows of every tensor."""
        if len(parts[0]) == self.batch:
            self.tensors = tuple(parts)
            return
        if not self.tensors:
            self.tensors = tuple(_longer(part, self.batch) for part in parts)
        for whole, part in zip(self.tensors, parts, strict=True):
            whole[rows] = part


class Told(Protocol):
    """What is told about a solve."""

    @property
    def residual(self) -> Tensor:
        """That of every sample's answer."""
        ...

    @property
    def steps(self) -> Tensor:
        """How many every sample took."""
        ...

    @property
    def codes(self) -> Tensor:
        """How every sample ended."""
        ...

    @property
    def trace(self) -> Tensor | None:
        """Residuals ``(steps + 1, B)``."""
        ...


Numbers = TypeVar("Numbers", bound=Told)


def joined(parts: Sequence[Numbers]) -> Numbers:
    """What is told about the parts of a batch, as about the whole; the rest is the first part's."""
    if len(parts) == 1:
        return parts[0]
    found: Numbers = replace(  # type: ignore[type-var]
        parts[0],
        residual=torch.cat([part.residual for part in parts]),
        steps=torch.cat([part.steps for part in parts]),
        codes=torch.cat([part.codes for part in parts]),
        history=_joined_traces([part.trace for part in parts if part.trace is not None]),
    )
    return found


def _joined_traces(traces: Sequence[Tensor]) -> Tensor:
    """Residuals ``(steps + 1, B)`` of all samples: a part that was finished earlier keeps its last ones."""
    longest = max(len(trace) for trace in traces)
    return torch.cat([torch.cat([trace, trace[-1:].expand(longest - len(trace), -1)]) for trace in traces], dim=1)


def _longer(part: Tensor, batch: int) -> Tensor:
    """Room for a batch of what ``part`` has some samples of, in the same layout."""
    shape = batch, *part.shape[1:]
    dense = part.stride(0) == math.prod(part.shape[1:])
    return part.new_empty_strided(shape, part.stride()) if dense else part.new_empty(shape)
