"""A learned potential: its derivative is piecewise linear, with slopes that never leave a stated range."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.common.validate import check_flag, check_not_negative, check_positive, check_whole
from opteq.potentials.base import Curve, Potential
from opteq.potentials.classic import Huber, Student
from opteq.states import is_channels_last


@dataclass(frozen=True)
class SplineCurve(Curve):
    """``psi'(u) = p_k sign(u) + q_k u`` on interval k: one lookup and one multiplication, for any number of knots.

    Attributes:
        table: ``(3, C, K + 1)``, for each interval the constants v, p, q of ``psi(u) = v + p |u| + q u^2/2`` (odd) or
            ``v + p u + q u^2/2`` (free); the last interval of every channel has no end.
        width: length of an interval.
        odd: whether ``psi'`` is odd, so that intervals are those of ``|u|``.
    """

    table: Tensor
    width: float
    odd: bool

    def value(self, u: Tensor) -> Tensor:
        v, p, q = self._pieces(u, 0, 1, 2)
        return v + p * (u.abs() if self.odd else u) + q * u.square() / 2

    def derivative(self, u: Tensor) -> Tensor:
        p, q = self._pieces(u, 1, 2)
        return torch.addcmul(p * u.sign() if self.odd else p, q, u)

    def second(self, u: Tensor) -> Tensor:
        return torch.where(u.isnan(), u, self._pieces(u, 2)[0])

    def _pieces(self, u: Tensor, *which: int) -> list[Tensor]:
        """Constants of the interval that each entry lies in."""
        _, channels, intervals = self.table.shape
        last = intervals - 1
        place = u.detach().abs() / self.width if self.odd else u.detach() / self.width + last // 2
        # Clamped as numbers, since an integer may not hold a large one; and as integers, since NaN becomes any of them.
        index = place.clamp(min=0, max=last).to(torch.int32).clamp_(0, last)
        if channels > 1:
            offsets = torch.arange(0, channels * intervals, intervals, dtype=torch.int32, device=u.device)
            index = index + offsets.reshape(-1, *[1] * (u.ndim - 2))
        rows = self.table.to(u.dtype).reshape(3, -1)
        if not is_channels_last(u):
            return [rows[row].index_select(0, index.reshape(-1)).reshape(u.shape) for row in which]
        # In the order of memory: reshaping would copy.
        index = index.movedim(1, -1)
        flat = index.reshape(-1)
        return [rows[row].index_select(0, flat).reshape(index.shape).movedim(-1, 1) for row in which]


class Spline(Potential):
    """``psi'`` linear between equidistant knots, with slopes in ``[-rho, mu]``, constant outside the last knots.

    For all values of ``raw``, the slopes are ``m + h raw / sqrt(1 + raw^2)`` with m and h the middle and half the
    length of the range. So psi is rho-weakly convex (convex for rho = 0), and its gradient is Lipschitz with constant
    ``max(rho, mu)``.

    Args:
        channels: number of channels with a curve of their own; None for one curve for all entries.
        knots: intervals between 0 and ``reach``.
        reach: where the curve becomes linear, in units of the scale.
        rho: how concave psi may become.
        mu: how convex psi may become.
        odd: whether ``psi'(-u) = -psi'(u)``, so that psi is even. Without it, ``psi'(0) = 0`` still holds.
        scale, learned: as for :class:`Potential`.

    It starts as a multiple of :class:`Huber` (rho = 0) or :class:`Student`, as steep as the range allows.

    >>> potential = Spline(knots=8, reach=4.0, rho=0.0, mu=1.0)
    >>> bool((potential.derivative(torch.linspace(-9, 9, 50)).diff() >= 0).all())
    True
    """

    def __init__(
        self,
        channels: int | None = None,
        knots: int = 32,
        reach: float = 4.0,
        rho: float = 0.0,
        mu: float = 1.0,
        odd: bool = True,
        scale: float = 1.0,
        learned: bool = False,
    ) -> None:
        super().__init__(scale, channels, learned)
        self.knots, self.odd = check_whole("Spline.knots", knots), check_flag("Spline.odd", odd)
        self.reach, self.mu = check_positive("Spline.reach", reach), check_positive("Spline.mu", mu)
        self.rho = check_not_negative("Spline.rho", rho)
        intervals = knots if odd else 2 * knots
        self.raw = nn.Parameter(torch.empty(channels or 1, intervals))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Slopes of a potential that is known to work."""
        if self.raw.is_meta:  # a model of shapes alone
            return
        like = Huber() if self.rho == 0 else Student()
        low, high = (float(end) for end in like.curvature())
        gain = 0.9 * min(self.mu / high, self.rho / -low if low < 0 else math.inf)
        width = self.reach / self.knots
        middles = (torch.arange(self.raw.shape[1]) + 0.5) * width - (0 if self.odd else self.reach)
        middle, half = self._range()
        share = (gain * like.second(middles) - middle) / half
        share = share.clamp(-0.98, 0.98)
        self.raw.copy_(share / (1 - share.square()).sqrt())

    def slopes(self) -> Tensor:
        """The slopes of ``psi'`` between knots, ``(C, intervals)``, all within ``[-rho, mu]``."""
        bent = self.raw / (1 + self.raw.square()).sqrt()
        middle, half = self._range()
        # Rounding may carry the sum just outside.
        return (middle + half * bent).clamp(-self.rho, self.mu)

    def prepare(self) -> SplineCurve:
        slopes = self.slopes()
        width = self.reach / self.knots
        zero = slopes.new_zeros(slopes.shape[0], 1)
        levels = torch.cat([zero, slopes.cumsum(dim=1)], dim=1) * width  # psi' at knots, but for a constant
        knots = torch.arange(levels.shape[1], device=slopes.device, dtype=slopes.dtype) * width
        if not self.odd:
            knots = knots - self.reach
            levels = levels - levels[:, self.knots, None]  # so that psi'(0) = 0
        q = torch.cat([slopes, zero], dim=1)
        p = levels - q * knots
        heights = torch.cat([zero, (width * (levels[:, :-1] + levels[:, 1:]) / 2).cumsum(dim=1)], dim=1)
        if not self.odd:
            heights = heights - heights[:, self.knots, None]
        v = heights - p * knots - q * knots.square() / 2
        table = torch.stack([v, p, q])
        if not self.odd:  # left of the first knot psi' is constant, too; the right end twice puts 0 in the middle
            left = torch.stack([heights[:, :1] - levels[:, :1] * knots[0], levels[:, :1], zero])
            table = torch.cat([left, table, table[:, :, -1:]], dim=2)
        return SplineCurve(table, width, self.odd)

    def curvature(self) -> tuple[Tensor, Tensor]:
        slopes = self.slopes()
        low, high = slopes.amin(dim=1).clamp(max=0), slopes.amax(dim=1).clamp(min=0)
        return (low[0], high[0]) if self.channels is None else (low, high)

    @property
    def convex(self) -> bool:
        return self.rho == 0

    def _range(self) -> tuple[float, float]:
        """The middle of the slopes' range, and half its length."""
        return (self.mu - self.rho) / 2, (self.mu + self.rho) / 2

    def extra_repr(self) -> str:
        own = f"knots={self.knots}, reach={self.reach:g}, rho={self.rho:g}, mu={self.mu:g}, odd={self.odd}"
        return f"{own}, {super().extra_repr()}"
