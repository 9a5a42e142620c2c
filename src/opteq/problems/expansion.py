"""One layer evaluated as it is, or cheaply near a point where that was done; and its derivative there."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from opteq._fast import settings
from opteq._room import Room
from opteq.operators.coarse import CoarseConvMap, coarse_map
from opteq.operators.conv import ConvMap
from opteq.operators.joined import has_joined_kernels
from opteq.operators.prepared import PreparedConv, WeightSum
from opteq.operators.recalled import recalled
from opteq.penalties import ElementwisePenalty, ReLU
from opteq.problems.block import Block
from opteq.states import is_channels_last, rows_of

# Above it, an error of 1e-6 in products is far below what is asked for.
_LEAST_TOL_FOR_ROUGH = 1e-5
_HUGE = 1e30
# Bytes of states that are solved together, so that memory is used again while it is in the caches of a processor.
# Transformed tiles are several times as large as states, and want to be there too.
_PART = 2**23
_TRANSFORMED_PART = 2**21

Known = tuple[Tensor, ...]
"""An evaluation: features z, ``t = W z + c``, what :meth:`Expansion.near` wants to know of t, and the image T(z).

Of a ReLU without rough products, ``sigma(t)`` tells all that is ever wanted of t, and is in its place.
"""


class Expansion:
    """``T(z) = W' sigma(W z + c) / mu`` and what is known of it at a point ``z0``.

    W is linear, so ``W z = W z0 + W (z - z0)``; and so is ``W'``. Where the products at ``z0`` are known in full
    precision, those of the differences may be rough: an error of thousandths of ``z - z0`` is left, which vanishes as a
    solver approaches its answer. Products in bfloat16 are four to eight times as fast as those in float32 on processors
    with units for them; on others :attr:`coarse` is None, and every evaluation is a full one.

    An evaluation also holds all that its derivative needs, so that none of its products is computed again for one.
    """

    def __init__(self, W: ConvMap, block: Block, penalty: ElementwisePenalty) -> None:
        self.W = W
        self.c = block.c
        self.mu = block.mu
        self.penalty = penalty
        self.coarse: CoarseConvMap | None = coarse_map(W)
        self.rectifies = self.coarse is None and type(penalty) is ReLU
        self.room: Room | None = None
        self.rearranges = False
        self.products = PreparedConv(W, self.c.detach())

    @classmethod
    def of(cls, block: Block) -> Expansion | None:
        """The expansion of a block on a CPU; None where it would gain nothing, or a transformation looks on."""
        W, c, penalty = block.W, block.c, block.penalty
        if not isinstance(W, ConvMap) or not isinstance(penalty, ElementwisePenalty) or c.ndim != 4:
            return None
        if c.device.type != "cpu" or c.dtype != W.weight.dtype or c.shape[1] != W.weight.shape[0]:
            return None
        if c.dtype not in (torch.float32, torch.float64):  # sums would need more digits than states have
            return None
        if not (settings.fused and settings.looking) or settings.interpreted or torch.is_autocast_enabled("cpu"):
            return None
        return None if torch._C._are_functorch_transforms_active() else cls(W, block, penalty)

    @property
    def error(self) -> float | None:
        """How far :meth:`near` may be off, relative to the distance; None where there is no such thing."""
        return None if self.coarse is None else self.coarse.error

    @property
    def learns(self) -> bool:
        """Whether the activation has a tape of its own, which leads to a parameter inside the penalty."""
        return self.penalty.prox(self.c.detach()[:1]).requires_grad

    def solved_to(self, tol: float, room: Room) -> Expansion:
        """The same for one solve to a tolerance, in a room: with products as exact as it needs."""
        found, c = copy.copy(self), self.c.detach()
        found.room = room
        # Kernels for pictures whose channels lie last take less time, by far more than it takes to rearrange them once.
        found.rearranges = (
            c.dtype == torch.float32 and c.is_contiguous() and not is_channels_last(c) and has_joined_kernels()
        )
        like = c[:1].contiguous(memory_format=torch.channels_last) if found.rearranges else c
        rough = tol >= _LEAST_TOL_FOR_ROUGH and not self._is_huge(c)
        found.products = PreparedConv(self.W, like, room if rough else None)
        return found

    @staticmethod
    def _is_huge(c: Tensor) -> bool:
        """Whether sums of a few entries may overflow where products with a weight do not."""
        return bool(c.numel()) and _HUGE < float(c.abs().amax()) < torch.inf

    def parts(self) -> list[slice]:
        """The batch in parts that are best solved one after the other, as no sample depends on another."""
        batch, size = len(self.c), self.c.numel() * self.c.element_size()
        most = _PART if self.products.room is None else _TRANSFORMED_PART
        count = max(1, min(batch, round(size / most)))
        length = max(1, -(-batch // count))
        return [slice(begin, min(begin + length, batch)) for begin in range(0, batch, length)] or [slice(0, 0)]

    def part(self, rows: slice) -> Expansion:
        """The same for a part of the batch."""
        found = copy.copy(self)
        found.c = self.taken(self.c.detach()[rows])
        return found

    def taken(self, pictures: Tensor) -> Tensor:
        """Pictures as a part of a solve has them."""
        return pictures.contiguous(memory_format=torch.channels_last) if self.rearranges else pictures

    def given(self, pictures: Tensor) -> Tensor:
        """Pictures as they are handed out."""
        return pictures.contiguous() if self.rearranges else pictures

    def begin(self) -> Known:
        """The evaluation at zero features, where W has nothing to multiply."""
        t = self.c.detach()
        y = self.penalty.prox(t)
        image = self._back(y)
        return torch.zeros_like(image), *((y,) if self.rectifies else (t, *self._noted(t))), image

    def exact(self, z: Tensor, rows: Tensor | None = None) -> Known:
        """The evaluation at z, which holds all samples or those of ``rows``."""
        c = self.c.detach()
        c = c if rows is None else rows_of(c, rows)
        if self.rectifies:
            y = self.products.rectified(z, c)
            return z, y, self._back(y)
        t = self.products(z).add_(c)
        return z, t, *self._noted(t), self._back(self.penalty.prox(t))

    def near(self, known: Known, z: Tensor) -> tuple[Tensor, Tensor]:
        """``T(z)``, up to :attr:`error` times the distance to a known point, and the difference of the two points."""
        assert self.coarse is not None
        move = z - known[0]
        change = self.coarse.adjoint(self._difference(known, self.coarse(move)))
        return known[-1] + (change if self.mu == 1 else change / self.mu), move

    def onward(self, known: Known) -> Known:
        """One more plain step from a known point, where it costs little: its image is the new point.

        The residual there is smaller, by the rate of contraction at least and up to :attr:`error`.
        """
        if self.coarse is None:
            return known
        z0, t0, image0 = known[0], known[1], known[-1]
        moved = self.coarse(image0 - z0)
        change = self.coarse.adjoint(self._difference(known, moved))
        return image0, t0 + moved, *known[2:-1], image0 + (change if self.mu == 1 else change / self.mu)

    def activation(self, known: Known) -> Tensor:
        """``y = sigma(W z + c)`` at a known point."""
        return known[1] if self.rectifies else self.penalty.prox(known[1])

    def state(self, known: Known, features: Tensor) -> Tensor:
        """The same, on a tape that leads to the weight, to c and to ``features`` in z's place."""
        y = known[1]
        if not self.rectifies:
            found = self.penalty.prox(recalled(self.W, features, self.c, y))
            # An activation may hand back what it is given.
            return found.clone() if found.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() else found

        def slope(gradient: Tensor) -> Tensor:
            through: Tensor = torch.ops.aten.threshold_backward(gradient, y, 0)
            return through

        # A copy: what is handed out may be changed in place, and what is known is needed on the way back.
        return recalled(self.W, features, self.c, y, slope).clone()

    def slope(self, known: Known) -> Tensor:
        """``D``, the derivative of the activation at a known point."""
        return known[1].sign() if self.rectifies else self.penalty.derivative(known[1])

    def product(self, slope: Tensor, u: Tensor) -> tuple[Tensor, Tensor | None]:
        """``J u = W' D W u / mu``, and ``W u`` on the way where it is of use later."""
        if self.coarse is None:
            return self._back(self.products.weighed(u, slope)), None
        carried = self.products(u)
        return self._back(slope * carried), carried

    def coarse_product(self, slope: Tensor, u: Tensor) -> Tensor:
        """``J u`` up to :attr:`error`, for a slope in bfloat16."""
        assert self.coarse is not None
        image = self.coarse.adjoint(slope * self.coarse(u))
        return image if self.mu == 1 else image / self.mu

    def pull(self, slope: Tensor, u: Tensor, carried: Tensor | None) -> Tensor:
        """What ``u`` gives to c, as the gradient of ``T(z)`` where the slope is known, and maybe ``W u``."""
        through = self.products.weighed(u, slope) if carried is None else slope * carried
        return through if self.mu == 1 else through.div_(self.mu)

    def pull_weight(self, total: WeightSum, known: Known, u: Tensor, through: Tensor) -> None:
        """Add what ``u`` gives to the weight, with what it gives to c."""
        total.add(u if self.mu == 1 else u / self.mu, self.activation(known))
        total.add(known[0], through)

    def _back(self, y: Tensor) -> Tensor:
        z = self.products.adjoint(y)
        return z if self.mu == 1 else z.div_(self.mu)

    def _noted(self, t: Tensor) -> Known:
        """What :meth:`_difference` needs beside t."""
        if self.coarse is None:
            return ()
        if type(self.penalty) is not ReLU:
            return (self.penalty.prox(t),)
        fall = t.to(torch.bfloat16).neg_()
        return fall, fall.clamp(min=0)

    def _difference(self, known: Known, move: Tensor) -> Tensor:
        """``sigma(t + move) - sigma(t)``, for a move in bfloat16.

        Of a ReLU it is ``max(move, -t) - max(-t, 0)``. With t rounded that is 0 where it should be, and elsewhere off
        by the rounding of a t that is smaller than the move: bfloat16 will do.
        """
        if type(self.penalty) is ReLU:
            return torch.maximum(move, known[2]).sub_(known[3])
        return self.penalty.prox(known[1] + move) - known[2]
