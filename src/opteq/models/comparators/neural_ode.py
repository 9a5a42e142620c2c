"""Neural ODEs (Chen et al. 2018) and augmented ones (Dupont et al. 2019), solved by torchdiffeq."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opteq.common.errors import UserError, needs_extra
from opteq.models.blocks.parts import Parts
from opteq.models.checks import number, one_of, option, whole
from opteq.models.comparators.mondeq import CellHead
from opteq.models.options import Options
from opteq.solution import BackwardSlot, Report
from opteq.solvers import Status
from opteq.states import Autocast


@dataclass(frozen=True, kw_only=True)
class NeuralODEOptions(Options):
    """Options of a neural ODE."""

    filters: int = option(125, whole(), "channels inside the vector field")
    augment: int = option(0, whole(0), "channels of zeros beside those of the image")
    tol: float = option(1e-3, number(), "absolute and relative error of a step of the adaptive solver (dopri5)")
    gradient: str = option(
        "adjoint",
        one_of(["adjoint", "direct"]),
        "adjoint solves an ODE backwards, in memory that does not grow with the steps; direct differentiates the steps",
    )
    cells: int = option(32, whole(), "height and width to which features are averaged before the linear layer")


class VectorField(nn.Module):
    """``f(t, h)``: convolutions 1x1, 3x3 and 1x1 with ReLUs; each sees the time as one more channel."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels + 1, filters, 1)
        self.middle = nn.Conv2d(filters + 1, filters, 3, padding=1)
        self.last = nn.Conv2d(filters + 1, channels, 1)
        self.evaluations = 0

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        """The derivative of ``h``, ``(B, channels, height, width)``, at time t."""
        self.evaluations += 1
        multiple = 8 if h.is_cuda else 1  # cuDNN would otherwise copy inputs to add channels of zeros
        h = h.contiguous(memory_format=torch.channels_last)  # torchdiffeq hands on parts of a vector
        h = torch.relu(convolve_with_time(self.first, t, h, multiple))
        h = torch.relu(convolve_with_time(self.middle, t, h, multiple))
        return convolve_with_time(self.last, t, h)


class NeuralODE(nn.Module):
    """``h(1)`` with ``h' = f(t, h)`` and ``h(0)`` the image and channels of zeros.

    It is solved in the precision of the image, also under autocast: the rounding of bfloat16 is above the tolerance of
    a step, so that steps would become shorter and shorter. ``last`` has the report of the latest call, as that of an
    equilibrium layer: its steps are evaluations of f, the same for all samples, which share the lengths of steps.
    """

    def __init__(self, in_channels: int, options: NeuralODEOptions) -> None:
        super().__init__()
        self.augment, self.tol, self.gradient = options.augment, options.tol, options.gradient
        self.field = VectorField(in_channels + options.augment, options.filters)
        self.last: tuple[Report, BackwardSlot] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``(B, c, h, w) -> (B, c + augment, h, w)``."""
        with needs_extra("comparators"):
            from torchdiffeq import odeint, odeint_adjoint
        solve = odeint_adjoint if self.gradient == "adjoint" else odeint
        start = F.pad(x, (0, 0, 0, 0, 0, self.augment))
        times = torch.linspace(0, 1, 2, device=x.device, dtype=x.dtype)
        before = self.field.evaluations
        try:
            with Autocast.current(x.device).off():
                path: Tensor = solve(self.field, start, times, rtol=self.tol, atol=self.tol, method="dopri5")
        except AssertionError as error:  # torchdiffeq's own, such as "underflow in dt"
            raise UserError(
                f"the ODE was not solved ({error}): its steps became too short, or a value was not finite. Try a lower "
                "learning rate, AdamW, or a larger model.options.tol"
            ) from error
        steps = torch.full((len(x),), self.field.evaluations - before, device=x.device)
        reached = torch.full_like(steps, int(Status.CONVERGED))  # dopri5 raises where it does not reach the end
        report = Report("dopri5", torch.zeros_like(steps, dtype=x.dtype), steps, reached, self.tol)
        self.last = report, BackwardSlot()
        return path[-1]


def build(in_channels: int, num_classes: int, options: NeuralODEOptions) -> Parts:
    """The ODE, and a linear layer."""
    channels = in_channels + options.augment
    return Parts(nn.Identity(), NeuralODE(in_channels, options), CellHead(channels, options.cells, num_classes))


def convolve_with_time(conv: nn.Conv2d, t: Tensor, h: Tensor, multiple: int = 1) -> Tensor:
    """The convolution of ``h`` and one more channel, the time; no tensor with that channel is made.

    Args:
        conv: its last input channel is the time.
        t: the time.
        h: ``(B, c, height, width)``; channels beyond those of ``conv`` are zeros.
        multiple: of the result's channels; zeros are added.
    """
    assert conv.bias is not None
    more = -conv.out_channels % multiple
    weight, bias = F.pad(conv.weight, (0, 0, 0, 0, 0, 0, 0, more)), F.pad(conv.bias, (0, more))
    of_state = F.pad(weight[:, :-1], (0, 0, 0, 0, 0, h.shape[1] + 1 - conv.in_channels))
    # By the whole weight: with torch 2.11 on an H200, 1x1 convolutions of one channel are wrong in some layouts.
    alone = F.pad(h.new_ones(1, 1, *h.shape[2:]), (0, 0, 0, 0, conv.in_channels - 1, 0))
    of_time = F.conv2d(alone, weight, padding=conv.padding)
    return F.conv2d(h, of_state, padding=conv.padding) + (bias[:, None, None] + t.to(h.dtype) * of_time)
