"""Denoisers: the minimiser of a data term and a learned prior, for all noise levels of a range."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from opteq.common.errors import UserError, format_value, unknown_name
from opteq.common.files import plain_errors, write_atomically
from opteq.equilibrium import Equilibrium
from opteq.gradients import Gradient, Implicit, Unrolled
from opteq.models.checks import Check, number, optional, whole, wholes
from opteq.models.meta_device import on_meta_device
from opteq.models.pretrained import weights
from opteq.models.pretrained.released import released, released_folder
from opteq.models.restoration import FilterPrior, Restoration
from opteq.models.restoration.guide import Guide
from opteq.models.restoration.noise_levels import NoiseLevels
from opteq.operators.chain import ConvChain
from opteq.potentials import Spline
from opteq.solvers import FISTA, Picard, Solver

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class DenoiserConfig:
    """The configuration of a denoiser.

    Attributes:
        channels, kernel_size: of the :class:`~opteq.operators.ConvChain` of filters.
        knots, reach: of the learned potentials, per channel.
        rho: how concave potentials may be; 0 gives a convex prior.
        mu: how convex they may be.
        least, most, degree: noise levels, see :class:`~opteq.models.restoration.noise_levels.NoiseLevels`.
        margin: strong convexity of the energy.
        steepest: largest curvature of the prior.
        guide, depth, repeats: channels, blocks and their repetitions in the
            :class:`~opteq.models.restoration.guide.Guide` that sets the prior's terms from the given image; ``guide=0``
            for a prior that is the same everywhere.
        steps: 0 for the minimiser of the energy; else exactly so many plain steps towards it.
    """

    channels: tuple[int, ...] = (1, 4, 8, 56)
    kernel_size: int = 5
    knots: int = 24
    reach: float = 4.0
    rho: float = 1.0
    mu: float = 10.0
    least: float = 5 / 255
    most: float = 55 / 255
    degree: int = 2
    margin: float = 0.01
    steepest: float | None = 50.0
    guide: int = 0
    depth: int = 3
    repeats: int = 4
    steps: int = 0

    @property
    def usual_sigma(self) -> float:
        """The noise level, of 255, where none is chosen: 25, or the nearest that is trained for."""
        return min(max(25.0, 255 * self.least), 255 * self.most)


class Denoiser(nn.Module):
    """``y = argmin 1/2 |y - x|^2 + R_sigma(y)`` for grey images ``(B, 1, h, w)`` and noise levels ``(B,)``.

    Args:
        config: what the prior is made of.
        solver, gradient: as for :class:`~opteq.Equilibrium`.
        on_failure, compile: likewise.
    """

    def __init__(
        self,
        config: DenoiserConfig | None = None,
        solver: Solver | None = None,
        gradient: Gradient | None = None,
        on_failure: str = "warn",
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.config = config = config or DenoiserConfig()
        width = config.channels[-1]
        filters = ConvChain(config.channels, config.kernel_size)
        potential = Spline(width, config.knots, config.reach, config.rho, config.mu)
        levels = NoiseLevels(width, config.least, config.most, config.degree)
        with torch.no_grad():  # potentials bend at about twice the noise of a response
            levels.log_scale[0] = (2 * filters.prepare().composed_kernel().flatten(1).norm(dim=1)).log()
        guide = Guide(width, config.guide, config.depth, config.repeats) if config.guide else None
        self.prior = FilterPrior(filters, potential, levels, config.margin, guide, config.steepest)
        if config.steps:
            solver, gradient = Picard(tol=0, max_steps=config.steps), Unrolled(config.steps)
        solver = FISTA(tol=1e-5, max_steps=1000) if solver is None else solver
        gradient = Implicit(tol=1e-3, max_steps=200) if gradient is None else gradient
        self.layer = Equilibrium(Restoration(self.prior), solver, gradient, on_failure, compile=compile)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The denoised images."""
        image: Tensor = self.layer((x, sigma))
        return image

    @torch.no_grad()
    def predict(self, image: Tensor, sigma: float) -> Tensor:
        """The denoised image, in [0, 1]: each channel by itself.

        Args:
            image: ``(h, w)`` or ``(channels, h, w)``, floating point in [0, 1].
            sigma: standard deviation of the noise, in the same scale.
        """
        if image.ndim not in (2, 3) or not image.is_floating_point():
            given = f"{image.dtype} of shape {tuple(image.shape)}"
            raise UserError(f"an image to denoise should be floating point, (h, w) or (channels, h, w); got {given}")
        if not sigma > 0:
            raise UserError(f"sigma, the standard deviation of the noise, should be positive; got {sigma!r}")
        weight = next(self.prior.parameters())
        x = image.reshape(-1, 1, *image.shape[-2:]).to(weight)
        denoised: Tensor = self(x, x.new_full((len(x),), sigma)).clamp(0, 1)
        return denoised.reshape(image.shape)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.prior.parameters())

    def save(self, folder: str | Path) -> Path:
        """Write configuration and weights into ``folder``; the weights know their own digest."""
        folder = Path(folder)
        text = json.dumps({"denoiser": dataclasses.asdict(self.config)}, indent=2) + "\n"
        with plain_errors(f"writing the model to {folder}", "or choose another place"):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / WEIGHTS, weights.to_bytes(self.prior))
            write_atomically(folder / CONFIG, text.encode())
        return folder

    @classmethod
    def load(cls, folder: str | Path, solver: Solver | None = None, on_failure: str = "warn") -> Denoiser:
        """The denoiser that :meth:`save` wrote into ``folder``, or one of the package's weights by its name."""
        folder = released_folder(folder)
        config = _read_config(folder)
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"{folder} holds no weights; {WEIGHTS} should be there")
        try:
            with (
                on_meta_device()
            ):  # nothing is allocated before the file is known to have the shapes that are asked for
                model = cls(config, solver, on_failure=on_failure)
        except ValueError as error:
            raise UserError(f"{folder / CONFIG}: {error}") from error
        weights.load(model.prior, folder / WEIGHTS)
        return model


def holds_denoiser(folder: Path) -> bool:
    """Whether the configuration in a folder is that of a denoiser."""
    try:
        return "denoiser" in json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


_ANY = number(open_below=False)
_CHECKS: dict[str, Check] = {
    "channels": wholes(1), "kernel_size": whole(1, 63), "knots": whole(2), "reach": number(), "rho": _ANY,
    "mu": number(), "least": number(), "most": number(), "degree": whole(0, 64),
    "margin": number(0.0, 1.0, open_below=False), "steepest": optional(number()), "guide": whole(0),
    "depth": whole(1, 1000), "repeats": whole(1, 1000), "steps": whole(0),
}  # fmt: skip


def _read_config(folder: Path) -> DenoiserConfig:
    """The content of ``config.json``, with every value checked."""
    path = folder / CONFIG
    try:
        options = json.loads(path.read_bytes())["denoiser"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        here = ", ".join(one.name for one in released() if one.kind == "denoiser")
        why = f"{CONFIG} is missing or says something else; the package has weights named {here}"
        raise UserError(f"{folder} holds no denoiser: {why}") from error
    if not isinstance(options, dict):
        raise UserError(f"{path}: denoiser should be a table of options; got {format_value(options)}")
    for name in options:
        if name not in _CHECKS:
            raise UserError(f"{path}: {unknown_name('option', name, _CHECKS)}; another version may have written it")
    try:
        return DenoiserConfig(**{name: _CHECKS[name].apply(name, value) for name, value in options.items()})
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
