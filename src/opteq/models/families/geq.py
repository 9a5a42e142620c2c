"""The GEQ family: branches side by side, each to resemble its view of the input by a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.common.errors import UserError
from opteq.kernels import Gaussian, Kernel, Linear, Polynomial, Sigmoid
from opteq.models.blocks.fusion import AverageBranches
from opteq.models.blocks.parts import Head, Parts, make_injection, make_stem
from opteq.models.checks import Check, either, flag, number, one_of, option, optional, whole
from opteq.models.options import BranchOptions
from opteq.operators import Conv2d
from opteq.problems import GEQ, Parallel
from opteq.states import working_dtype


@dataclass(frozen=True, kw_only=True)
class GEQOptions(BranchOptions):
    """Options of GEQ."""

    kernel: str = option(
        "gaussian", one_of(("gaussian", "linear", "polynomial", "sigmoid")), "how state and input are compared"
    )
    gamma: float | str = option(
        "auto",
        either(Check("'auto' or 'median'", lambda value: value in ("auto", "median")), number()),
        "sharpness of the Gaussian kernel; auto is 0.2 / M per sample, M the least squared length of a patch; median "
        "takes the median of them for M",
    )
    learn_gamma: bool = option(False, flag(), "learn one gamma per branch, initialised at the value given")
    patch: int | None = option(2, optional(whole()), "side of a patch in pixels; none compares whole images")
    split: int = option(8, whole(), "channels in a patch")
    projection: int | None = option(64, optional(whole()), "size to which P projects patches; none for no projection")
    projection_bound: float | None = option(1.0, optional(number()), "largest norm of P")
    degree: int = option(2, whole(2), "of the polynomial kernel")
    fusion: str = option(
        "none",
        one_of(("none", "average")),
        "average: the mean of all branches at the finest size, as in the paper; none leaves them to the head",
    )
    input_length: float | None = option(
        None, optional(number()), "norm to which U x + b of each sample is normalised; none for no normalisation"
    )

    def read_branches(self) -> int:
        return super().read_branches() if self.fusion == "none" else 1

    def idle(self) -> dict[str, str]:
        unused = super().idle()
        if self.kernel != "polynomial":
            unused["degree"] = f"with kernel={self.kernel!r}; it belongs to kernel='polynomial'"
        if self.kernel != "gaussian":
            why = f"with kernel={self.kernel!r}; it belongs to kernel='gaussian'"
            return unused | dict.fromkeys(
                ("gamma", "learn_gamma", "patch", "split", "projection", "projection_bound"), why
            )
        if self.patch is None:
            why = "with patch=none, which compares whole images"
            unused |= dict.fromkeys(("split", "projection_bound", *(["projection"] if self.projection else [])), why)
        elif self.projection is None:
            unused["projection_bound"] = "with projection=none"
        return unused


class NormalisedInjection(nn.Module):
    """``length * U x / |U x|``, per sample.

    Kernels of ``<c, y>`` over the whole image need it: with entries of c of about 1, ``|c|^2`` is as large as the
    number of pixels, where tanh saturates and a power overflows. With a norm of about 1 the sigmoid kernel is not
    saturated, and the quadratic one has, with a bounded activation, an equilibrium other than zero.

    Args:
        inner: ``U``, with its normalisation where it has one.
        length: of the result.
    """

    def __init__(self, inner: nn.Module, length: float) -> None:
        super().__init__()
        self.inner = inner
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        """Each sample of ``inner(x)`` at the length; one that is zero stays zero."""
        c: Tensor = self.inner(x)
        wide = c.to(working_dtype(c.dtype))  # a sum over an image is too much for half precision
        size = torch.linalg.vector_norm(wide.flatten(1), dim=1).clamp_min(torch.finfo(wide.dtype).tiny ** 0.5)
        scaled: Tensor = wide * (self.length / size).reshape(-1, *[1] * (c.ndim - 1))
        return scaled.to(c.dtype)


def build(in_channels: int, num_classes: int, options: GEQOptions) -> Parts:
    """Stem, equilibrium and head of a GEQ with branches."""
    options.prior_in_objective(takes_one=False)
    channels = options.channels
    stem = make_stem(in_channels, options, options.scales)
    problems = []
    for size, seen in zip(options.hidden, stem.channels, strict=True):
        kernel = _kernel(options)
        W = Conv2d(channels, size, options.weight_kernel, bound=options.bound)
        # The Gaussian kernel compares in the space of W's output, the others in that of the state.
        compared = size if kernel.input_space == "output" else channels
        U: nn.Module = make_injection(seen, compared, options)
        if options.input_length is not None:
            U = NormalisedInjection(U, options.input_length)
        problems.append(GEQ(W, U, kernel, options.activation))
    layer = options.layer(Parallel(problems, options.scales))
    if options.fusion == "none":
        return Parts(stem.module, layer, Head([channels] * len(problems), num_classes, options))
    return Parts(stem.module, layer, Head([channels], num_classes, options, fuse=AverageBranches()))


def _kernel(options: GEQOptions) -> Kernel:
    if options.kernel == "gaussian":
        cut = options.patch is not None
        if options.learn_gamma and isinstance(options.gamma, str):
            raise UserError(
                f"learn_gamma needs a number to begin from, such as gamma=0.02; got gamma={options.gamma!r}"
            )
        return Gaussian(
            options.gamma,
            options.patch,
            options.split if cut else None,
            options.projection if cut else None,
            learn_gamma=options.learn_gamma,
            bound=options.projection_bound,
        )
    if options.kernel == "polynomial":
        return Polynomial(options.degree)
    return Linear() if options.kernel == "linear" else Sigmoid()
