"""Image restoration: ``1/2 |A y - x|^2`` and a prior made of potentials of filter responses, certified by its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from opteq.common.options import NamedOptions
from opteq.models.restoration.guide import Guide
from opteq.models.restoration.measurement import Measurement, check_measurement, prepare_measurement
from opteq.models.restoration.noise_levels import NoiseLevels
from opteq.operators.base import Operator
from opteq.operators.chain import ChainMap, ConvChain, largest_response, response_powers
from opteq.penalties import Identity
from opteq.penalties.scaled import ScaledPenalty
from opteq.potentials import Curve, Potential
from opteq.potentials.base import scaled_derivative, scaled_second
from opteq.problems.certificate import Certificate, for_finite_weights
from opteq.problems.objective import Objective
from opteq.problems.proximal import ProximalGradient
from opteq.solvers.fista import FISTA
from opteq.states import State, single, sum_over_sample, working_dtype


class FilterPrior(nn.Module, metaclass=NamedOptions):
    """``R(y) = sum_c w_c sum psi_c((K y)_c)`` with filters K, potentials psi and weights and scales by noise level.

    With ``margin=m`` the weights are kept so small that ``1/2 |y - x|^2 + R(y)`` is m-strongly convex whatever an
    optimiser writes: they are divided by ``sup_w sum_c w_c rho_c |k_c(w)|^2 / (1 - m)`` where that exceeds 1, with
    ``rho_c`` how concave ``psi_c`` really is. Convex potentials are not touched.

    Args:
        filters: the filter bank, with one input channel.
        potential: the potentials, one per channel or one for all.
        levels: scales and weights by noise level.
        margin: strong convexity of the energy of denoising; None leaves weights as they are.
        guide: further weights, and expected responses, by channel and pixel, from the given image; None for none. A
            term is then ``psi_c((K y)_c - r_c)`` with the expected response ``r_c``.
        steepest: the largest curvature of R; weights are divided where it would be larger. It bounds the condition of
            the energy, and so the number of steps. None for no limit.
    """

    def __init__(
        self,
        filters: ConvChain,
        potential: Potential,
        levels: NoiseLevels,
        margin: float | None = 0.01,
        guide: Guide | None = None,
        steepest: float | None = None,
    ) -> None:
        super().__init__()
        if filters.channels[0] != 1:
            raise ValueError(f"FilterPrior.filters should have one input channel; got {filters.channels[0]}")
        if margin is not None and not 0 <= margin < 1:
            raise ValueError(f"FilterPrior.margin should lie in [0, 1), or be None; got {margin!r}")
        self.filters, self.potential, self.levels, self.margin = filters, potential, levels, margin
        self.guide = guide
        if steepest is not None and steepest <= 0:
            raise ValueError(f"FilterPrior.steepest should be positive, or None; got {steepest!r}")
        self.steepest = steepest

    def bind(self, sigma: Tensor, image: Tensor | None = None) -> BoundPrior:
        """The prior for noise levels ``(B,)``: everything that depends on parameters and input is computed here, once.

        Args:
            sigma: noise levels.
            image: the given image, which the guide reads.
        """
        chain = self.filters.prepare()
        kernel = chain.composed_kernel().to(working_dtype(chain.weights[0].dtype))
        powers = response_powers(kernel)
        scale, weight = self.levels(sigma)
        low, high = (end.to(weight.dtype).expand(weight.shape[1]) for end in self.potential.curvature())
        concavity = largest_response(powers, weight * -low, kernel)
        if self.margin is not None:
            shrink = (1 - self.margin) / concavity.clamp_min(1 - self.margin)
            # Bounds are computed in float32 or better, weights keep their dtype.
            weight, concavity = weight * shrink[:, None].to(weight.dtype), concavity * shrink
        curvature = largest_response(powers, weight * high, kernel)
        if self.steepest is not None:
            shrink = self.steepest / curvature.clamp_min(self.steepest)
            weight = weight * shrink[:, None].to(weight.dtype)
            concavity, curvature = concavity * shrink, curvature * shrink
        scale, weight = scale[:, :, None, None], weight[:, :, None, None]
        expected = None
        if self.guide is not None and image is not None:
            share, expected = self.guide(image, sigma)
            weight, expected = weight * share, expected * scale
        return BoundPrior(chain, self.potential.prepare(), scale, weight, concavity, curvature, expected)


class BoundPrior:
    """A prior for given noise levels: plain tensors.

    Attributes:
        filters, curve: K and psi.
        scale, weight: ``(B, C, 1, 1)``; the weight is ``(B, C, h, w)`` where it depends on the image.
        concavity, curvature: the Hessian of R lies between ``-concavity`` and ``curvature``, ``(B,)``.
        expected: responses ``(B, C, h, w)`` at which potentials are centred; None for zero.
    """

    def __init__(
        self,
        filters: ChainMap,
        curve: Curve,
        scale: Tensor,
        weight: Tensor,
        concavity: Tensor,
        curvature: Tensor,
        expected: Tensor | None = None,
    ) -> None:
        self.filters, self.curve, self.expected = filters, curve, expected
        self.scale, self.weight = scale, weight
        self.concavity, self.curvature = concavity, curvature
        self.inverse = 1 / self.scale
        self.force = self.weight * self.scale

    def value(self, y: Tensor) -> Tensor:
        """R, one number per sample."""
        values = self.curve.value(self._responses(y) * self.inverse)
        return sum_over_sample(self.force * self.scale * values)

    def gradient(self, y: Tensor) -> Tensor:
        """``K' (w s psi'(K y / s))``."""
        return self.filters.adjoint(scaled_derivative(self._responses(y), self.curve, self.inverse, self.force))

    def hessian_at(self, y: Tensor) -> Callable[[Tensor], Tensor]:
        """``v -> K' (w psi''(K y / s) K v)``."""
        slopes = scaled_second(self._responses(y), self.curve, self.inverse, self.weight)
        return lambda v: self.filters.adjoint(slopes * self.filters(v))

    def _responses(self, y: Tensor) -> Tensor:
        responses = self.filters(y)
        return responses if self.expected is None else responses - self.expected


class Restoration(Objective):
    """The image y that minimises ``1/2 |A y - x|^2 + strength R_sigma(y)``.

    The input is a tuple ``(x, sigma)``: measurements ``(B, ...)`` and noise levels ``(B,)``; or x alone, where the
    prior was given one noise level with ``sigma=``.

    Args:
        prior: the prior R.
        measurement: A: an :class:`~opteq.operators.Operator`, any object with ``A(y)`` and ``A_adjoint(u)``, or None
            for denoising.
        strength: factor of the prior.
        sigma: the noise level where the input does not bring one.
    """

    takes_tuples: ClassVar[bool] = True

    def __init__(
        self, prior: FilterPrior, measurement: Any = None, strength: float = 1.0, sigma: float | None = None
    ) -> None:
        super().__init__()
        if strength <= 0:
            raise ValueError(f"Restoration.strength should be positive; got {strength!r}")
        self.prior, self.strength, self.sigma = prior, float(strength), sigma
        self.measurement = check_measurement(measurement)

    def bind(self, x: Any) -> BoundRestoration:
        """The energy for these measurements."""
        image, sigma = self._split(x)
        prepared = prepare_measurement(self.measurement, image)
        estimate = image if prepared is None else prepared.adjoint(image)
        bound = self.prior.bind(sigma, estimate)
        return BoundRestoration(image, bound, prepared, self.strength, self._convex)

    def terms(self, y: State, x: Any) -> dict[str, Tensor]:
        """The data term and the prior."""
        return self.bind(x).terms(y)

    def default_solver(self) -> FISTA:
        """FISTA to a residual of 1e-5 where the energy is known to be convex; else as every objective.

        A measurement that does not see everything leaves flat directions, along which a small residual is reached long
        before the minimum.
        """
        return FISTA(tol=1e-5, max_steps=1000) if self._convex else super().default_solver()

    @for_finite_weights
    def certificate(self) -> Certificate:
        """From the curvature of potentials, the filters' spectrum and the least singular value of A."""
        least, most, lipschitz = self._curvature_range()
        names = ("exists", "unique", "contraction", "lipschitz")
        if least <= 0:
            why = (
                "the energy is convex, and not known to be strongly convex: nothing bounds directions that the "
                "measurement does not see"
                if least == 0
                else f"the energy's Hessian is only known to lie above {least:.4g}: a prior that is not convex leaves "
                "directions open that the measurement does not see"
            )
            return Certificate(reasons=dict.fromkeys(names, why))
        strong = f"the energy is {least:.4g}-strongly convex: the data term outweighs the concavity of the prior"
        step = f"a gradient step of length 1/{most:.4g} on an energy with Hessian in [{least:.4g}, {most:.4g}]"
        slope = f"|A| / m with m = {least:.4g} (from x to y, at a fixed noise level)"
        if self.prior.guide is not None:
            slope, lipschitz = "the terms of the prior depend on x in a way that is not bounded", math.nan
        reasons = {"exists": strong, "unique": strong, "contraction": step, "lipschitz": slope}
        constant = None if math.isnan(lipschitz) else lipschitz / least
        return Certificate(True, True, 1 - least / most, constant, reasons)

    @property
    def _convex(self) -> bool:
        """Whether the energy is convex whatever the weights are: known without looking at a number."""
        kept = self.measurement is None and self.prior.margin is not None and self.strength <= 1
        return kept or self.prior.potential.convex

    @torch.no_grad()
    def _curvature_range(self) -> tuple[float, float, float]:
        """The least and the largest curvature of the energy over all noise levels trained for, and ``|A|``."""
        levels = self.prior.levels
        like = levels.log_scale
        if self.sigma is None:
            sigma = torch.logspace(0, 1, 64, base=levels.most / levels.least).to(like) * levels.least
        else:
            sigma = like.new_tensor([self.sigma])
        bound = self.prior.bind(sigma)
        concavity, curvature = (self.strength * float(end.max()) for end in (bound.concavity, bound.curvature))
        low, high = 1.0, 1.0
        if isinstance(self.measurement, Operator):
            prepared = prepare_measurement(self.measurement, like)
            assert prepared is not None
            low, high = float(prepared.least), float(prepared.most)
        elif self.measurement is not None:
            low, high = 0.0, math.inf  # known only for images at hand
        return low**2 - concavity, high**2 + curvature, high

    def _split(self, x: Any) -> tuple[Tensor, Tensor]:
        if isinstance(x, tuple):
            if len(x) != 2 or x[1].shape != x[0].shape[:1]:
                got = ", ".join(str(tuple(part.shape)) for part in x)
                raise ValueError(f"Restoration takes x or (x, sigma) with sigma of shape (B,); got shapes {got}")
            return x[0], x[1]
        if self.sigma is None:
            raise ValueError("Restoration needs noise levels: give it a tuple (x, sigma), or the option sigma=")
        return x, x.new_full(x.shape[:1], self.sigma)


class BoundRestoration(ProximalGradient):
    """The energy with measurements and noise levels bound, and closed forms of its derivatives."""

    penalised = False

    def __init__(
        self, x: Tensor, prior: BoundPrior, measurement: Measurement | None, strength: float, convex: bool
    ) -> None:
        self.x, self.prior, self.measurement, self.strength = x, prior, measurement, strength
        size = 1.0 if measurement is None else measurement.most**2
        self.length = (1 / (size + strength * prior.curvature)).detach()
        # Where the prior's concavity is kept within the margin, the energy is convex and plain steps descend.
        self.penalty = ScaledPenalty(Identity(), self.length)
        self.convex = convex
        self.has_merit = not convex
        self._start = x if measurement is None else measurement.adjoint(x)

    def start(self) -> State:
        return self._start

    def gradient(self, y: State) -> State:
        image = single(y)
        rest = self._residual(image)
        data = rest if self.measurement is None else self.measurement.adjoint(rest)
        return torch.add(data, self.prior.gradient(image), alpha=self.strength)

    def value_and_gradient(self, y: State) -> tuple[Tensor, State]:
        return self.value(y), self.gradient(y)

    def hessian_at(self, y: State) -> Callable[[State], State]:
        inner = self.prior.hessian_at(single(y))

        def product(v: State) -> State:
            image = single(v)
            data = image if self.measurement is None else self.measurement.adjoint(self.measurement(image))
            total: Tensor = torch.add(data, inner(image), alpha=self.strength)
            return total

        return product

    def smooth_parts(self, y: State) -> dict[str, Tensor]:
        image = single(y)
        return {
            "data": sum_over_sample(self._residual(image).square()) / 2,
            "prior": self.strength * self.prior.value(image),
        }

    def _residual(self, y: Tensor) -> Tensor:
        return (y if self.measurement is None else self.measurement(y)) - self.x
