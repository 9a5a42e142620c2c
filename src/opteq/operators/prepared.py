"""Products with a convolution on a CPU, many with the same weight and without a tape: what can be prepared is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opteq._room import Room
from opteq.operators.conv import ConvMap
from opteq.operators.joined import JoinedWeight, has_joined_kernels
from opteq.operators.recalled import by_weight
from opteq.operators.winograd import WinogradSum, WinogradWeight, has_tiles
from opteq.states import is_channels_last

# With fewer channels, transforms take longer than they save.
_LEAST_CHANNELS = 64


class PreparedConv:
    """``A v`` and ``A' u``, and what follows them at once, for pictures of one size.

    A pass over memory takes a good part of the time of a convolution. So a sum, a rectification or a diagonal goes
    into the kernel of the convolution, where there is such a kernel; the adjoint is a convolution with the turned
    weight, for the same kernels; and wide convolutions of three by three are computed by Winograd's algorithm, where
    that is exact enough.

    Forms of the weight are kept with the map, for the way back.

    Args:
        linear: the convolution; no product is on a tape that leads to its weight.
        like: a picture ``(b, m, h, w)`` of outputs.
        room: where Winograd's algorithm may work, if errors of some 1e-6 don't matter. Results are never in it.
    """

    def __init__(self, linear: ConvMap, like: Tensor, room: Room | None = None) -> None:
        self.linear = linear
        self.weight = linear.weight.detach()
        self.room: Room | None = None
        self._joins = False
        same = type(like) is Tensor and like.device.type == "cpu" and like.dtype == self.weight.dtype == torch.float32
        if same and like.ndim == 4 and len(like) and is_channels_last(like) and self.weight.shape[1] > 1:
            wide = min(self.weight.shape[:2]) >= _LEAST_CHANNELS
            self.room = room if wide and has_tiles(self.weight, like.shape[2:]) else None
            self._joins = has_joined_kernels()

    def __call__(self, v: Tensor) -> Tensor:
        """``A v``."""
        return self._product(v, False, None, "nothing")

    def adjoint(self, u: Tensor) -> Tensor:
        """``A' u``."""
        return self._product(u, True, None, "nothing")

    def rectified(self, v: Tensor, c: Tensor) -> Tensor:
        """``relu(A v + c)``."""
        return self._product(v, False, c, "rectify")

    def weighed(self, v: Tensor, diagonal: Tensor) -> Tensor:
        """``D A v``."""
        return self._product(v, False, diagonal, "weigh")

    def weight_sum(self) -> WeightSum:
        """Where derivatives of ``<A v, u>`` by the weight are summed up."""
        return PlainSum(self.linear) if self.room is None else WinogradSum(self.weight, self.room)

    def _product(self, v: Tensor, adjoint: bool, beside: Tensor | None, then: str) -> Tensor:
        last = (self._joins or self.room is not None) and len(v) > 0 and is_channels_last(v)
        if last and (beside is None or is_channels_last(beside)):
            if self.room is not None:
                return self._transformed(adjoint).product(v, beside, then, self.room)
            return self._joined(adjoint).product(v, beside, then)
        found = (F.conv_transpose2d if adjoint else F.conv2d)(v, self.weight, padding=self.linear.padding)
        if beside is None:
            return found
        return found.add_(beside).relu_() if then == "rectify" else found.mul_(beside)

    def _transformed(self, adjoint: bool) -> WinogradWeight:
        found: WinogradWeight = self._kept("transformed", adjoint, lambda: WinogradWeight(self._turned(adjoint)))
        return found

    def _joined(self, adjoint: bool) -> JoinedWeight:
        found: JoinedWeight = self._kept(
            "joined", adjoint, lambda: JoinedWeight(self._turned(adjoint), self.linear.padding)
        )
        return found

    def _kept(self, kind: str, adjoint: bool, make: Callable[[], Any]) -> Any:
        """A form of the weight as it is now, made where there is none."""
        version, found = self.linear.prepared.get((kind, adjoint), (None, None))
        if found is None or version != self._version:
            found = make()
            self.linear.prepared[kind, adjoint] = self._version, found
        return found

    def _turned(self, adjoint: bool) -> Tensor:
        return self.weight.flip(2, 3).transpose(0, 1).contiguous() if adjoint else self.weight

    @property
    def _version(self) -> int:
        """What changes where somebody writes to the weight."""
        return 0 if self.weight.is_inference() else self.weight._version


class PlainSum:
    """The derivative of ``<A v, u>`` by the weight of A, summed over as many pairs as there are."""

    def __init__(self, linear: ConvMap) -> None:
        self.linear = linear
        self.total: Tensor | None = None

    def add(self, v: Tensor, u: Tensor) -> None:
        """One more pair."""
        found = by_weight(self.linear, v, u)
        self.total = found if self.total is None else self.total.add_(found)

    def result(self) -> Tensor:
        """The derivative; zeros where there was no pair."""
        return torch.zeros_like(self.linear.weight) if self.total is None else self.total


WeightSum = WinogradSum | PlainSum
