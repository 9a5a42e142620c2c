"""The MOptEq family: branches on several scales, coupled by heritage and diversity, or independent (POptEq)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opteq.common.errors import UserError
from opteq.kernels import Polynomial, Sigmoid
from opteq.models.blocks.kernel_mopteq import KernelMOptEq
from opteq.models.blocks.parts import Head, Parts, Stem, make_injection, make_stem
from opteq.models.checks import flag, number, one_of, option, optional, whole
from opteq.models.families.geq import NormalisedInjection
from opteq.models.options import BranchOptions
from opteq.operators import Conv2d
from opteq.operators.base import initial_norm
from opteq.problems import Branch, Inhibited, MOptEq, POptEq, Problem


@dataclass(frozen=True, kw_only=True)
class MOptEqOptions(BranchOptions):
    """Options of MOptEq."""

    diversity: float = option(0.001, number(open_below=False), "lambda, the weight of D in the objective")
    smoothing: float = option(
        1.0, number(open_below=False), "tau, the width to which D's kinks are smoothed; 0 keeps them, which may cycle"
    )
    heritage: bool = option(
        True, flag(), "whether neighbours are coupled by H; without it each branch has its own coupling"
    )
    perturbation: float = option(
        0.0, number(open_below=False), "largest entry of the perturbation of the next branch's input in training"
    )
    settle: int = option(8, whole(most=10**6), "steps after which perturbations stay constant")
    inhibition: int | None = option(
        None, optional(whole()), "channels of a space in which branches inhibit each other as well; none for none"
    )
    m: float = option(1.0, number(0, 1), "factor of 1/2 |y|^2 beside an inhibition")
    initial_norm: float | None = option(
        None, optional(number()), "norm of every W at the start; none for just within its bound, or 0.9 without one"
    )
    kernel: str = option(
        "linear", one_of(("linear", "polynomial", "sigmoid")), "how branches see the input; linear is MOptEq itself"
    )
    degree: int = option(2, whole(2), "of the polynomial kernel")
    input_length: float | None = option(
        None, optional(number()), "norm to which U x + b of each sample is normalised; none for no normalisation"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.heritage and self.bound is not None and self.bound >= 1:
            # With H, resampling between scales damps the feedback, so bounds above 1 still give a contraction.
            raise UserError(f"heritage=false needs a bound below 1, such as bound=0.95; got bound={self.bound:g}")
        if self.inhibition is None and self.m != 1:
            raise UserError(f"m has no effect without inhibition, such as inhibition=32; got m={self.m:g}")
        if self.initial_norm is not None and self.bound is not None and self.initial_norm > self.bound:
            raise UserError(f"initial_norm should be at most bound={self.bound:g}; got {self.initial_norm:g}")
        if self.kernel != "polynomial" and self.degree != 2:
            raise UserError(f"degree has no effect with kernel={self.kernel!r}; got degree={self.degree}")
        if self.kernel != "linear" and (self.perturbation or self.inhibition is not None):
            raise UserError(f"kernel={self.kernel!r} goes with neither perturbation nor inhibition")
        if self.perturbation and self.input_length is not None:
            raise UserError("perturbation needs the adjoint of U, which input_length does not have")
        if self.perturbation and self.injection_norm == "batch":
            raise UserError(
                "perturbation needs the adjoint of U, which batch normalisation does not have; "
                "use injection_norm='none' or 'group'"
            )

    def idle(self) -> dict[str, str]:
        unused = super().idle()
        if not self.diversity:
            unused["smoothing"] = "with diversity=0, whose kinks it would round"
        if not self.perturbation:
            unused["settle"] = "with perturbation=0, which it would freeze"
        return unused


@dataclass(frozen=True, kw_only=True)
class POptEqOptions(BranchOptions):
    """Options of POptEq."""

    fusion: str = option("none", one_of(("none", "sum", "conv")), "how the branches are combined before the head")

    def read_branches(self) -> int:
        return super().read_branches() if self.fusion == "none" else 1


def build_mopteq(in_channels: int, num_classes: int, options: MOptEqOptions) -> Parts:
    """Stem, equilibrium and head of an MOptEq."""
    options.prior_in_objective(takes_one=False)
    stem = make_stem(in_channels, options, options.scales)
    if options.perturbation and len(set(stem.channels)) > 1:
        raise UserError(
            "perturbation passes what one branch adds to its input to the next, so all branches need inputs with the "
            f"same number of channels; got {list(stem.channels)}"
        )
    branches = _branches(options, stem)
    if options.initial_norm is not None:
        for branch in branches:
            assert isinstance(branch.W, Conv2d)
            branch.W.weight.data.mul_(options.initial_norm / initial_norm(options.bound))
    if options.input_length is not None:
        for branch in branches:
            assert branch.U is not None
            branch.U = NormalisedInjection(branch.U, options.input_length)
    ties: dict[str, Any] = {
        "diversity": options.diversity,
        "activation": options.activation,
        "smoothing": options.smoothing,
        "heritage": options.heritage,
    }
    if options.kernel == "linear":
        settle = options.settle if options.perturbation else None
        problem: Problem = MOptEq(branches, perturbation=options.perturbation, settle=settle, **ties)
    else:
        kernel = Sigmoid() if options.kernel == "sigmoid" else Polynomial(options.degree)
        problem = KernelMOptEq(branches, kernel, **ties)
    if options.inhibition is not None:
        inhibiting = [Conv2d(options.inhibition, size, options.weight_kernel) for size in options.hidden]
        problem = Inhibited(problem, inhibiting, options.m)
    head = Head([options.channels] * len(options.hidden), num_classes, options)
    return Parts(stem.module, options.layer(problem), head)


def build_popteq(in_channels: int, num_classes: int, options: POptEqOptions) -> Parts:
    """Stem, equilibrium and head of a POptEq."""
    options.prior_in_objective(takes_one=False)
    stem = make_stem(in_channels, options, options.scales)
    problem = POptEq(_branches(options, stem), options.activation, options.fusion)
    channels, count = options.channels, len(options.hidden)
    read = {"none": [channels] * count, "sum": [channels], "conv": [channels * count]}[options.fusion]
    return Parts(stem.module, options.layer(problem), Head(read, num_classes, options))


def _branches(options: BranchOptions, stem: Stem) -> list[Branch]:
    return [
        Branch(
            Conv2d(options.channels, size, options.weight_kernel, bound=options.bound),
            make_injection(channels, size, options),
            scale,
        )
        for size, channels, scale in zip(options.hidden, stem.channels, options.scales, strict=True)
    ]
