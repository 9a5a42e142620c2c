"""Options shared by all models with an equilibrium, and the solver and gradient that they select."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from opteq import penalties, regularizers
from opteq.common.errors import UserError, unknown_name
from opteq.equilibrium import Equilibrium
from opteq.gradients import Gradient, Implicit, OneStep, Phantom, Shine, Unrolled
from opteq.models.blocks.residual import BLOCKS
from opteq.models.checks import each_of, either, flag, number, one_of, option, optional, whole, wholes
from opteq.problems.base import Problem
from opteq.regularizers import Regularizer
from opteq.solvers import FISTA, SAM, Anderson, Broyden, Picard, Solver

REGULARIZERS = ("none", "ridge", "l1", "incay", "decorrelation", "hsic")

_STEPS_WITHOUT_FEEDBACK = {"none": 1, "explicit": 2}

Given = TypeVar("Given", bound="Options")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a model: typed, validated, JSON-able and TOML-able."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            checked = field.metadata["check"].apply(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, checked)

    @classmethod
    def names(cls) -> list[str]:
        """The names of all options."""
        return [field.name for field in dataclasses.fields(cls)]

    @classmethod
    def explanations(cls) -> dict[str, str]:
        """One line about each option."""
        return {field.name: field.metadata["help"] for field in dataclasses.fields(cls)}

    def changed(self: Given, changes: Mapping[str, Any]) -> Given:
        """A copy with some options changed; an unknown name is an error with the nearest one."""
        for name in changes:
            if name not in self.names():
                raise unknown_name("option", name, self.names())
        options = dataclasses.replace(self, **changes)
        for name, why in options.idle().items():
            if getattr(options, name) != getattr(self, name):  # a model's own may wait for another choice
                raise UserError(f"{name} has no effect {why}")
        return options

    def idle(self) -> dict[str, str]:
        """Options that have no effect beside the others as they are, and why."""
        return {}

    def plain(self) -> dict[str, Any]:
        """As JSON has them: tuples become lists."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(self).items()
        }


@dataclass(frozen=True, kw_only=True)
class ClassifierOptions(Options):
    """Options of stem and head."""

    channels: int = option(64, whole(), "channels of the stem's output and of the features of every branch")
    stem: str = option(
        "plain",
        one_of(("plain", "residual", "pyramid")),
        "plain convolutions, residual blocks, or residual blocks on smaller and smaller images",
    )
    stem_depth: int | tuple[int, ...] = option(
        0,
        either(whole(0, most=256), wholes(0, most=256)),
        "plain: convolutions after the first; else blocks, in a pyramid on each level (or a list: one a level)",
    )
    stem_block: str | tuple[str, ...] = option(
        "basic",
        each_of(BLOCKS),
        "kind of residual blocks: basic (two convolutions) or inverted (each channel by itself, then all of a pixel); "
        "in a pyramid also a list with one value per level",
    )
    stem_width: int | None = option(None, optional(whole()), "channels inside a residual stem; none means `channels`")
    stem_widths: tuple[int, ...] | None = option(
        None, optional(wholes()), "channels of a pyramid's levels, each half as large as the one before"
    )
    stem_attention: bool = option(
        False, flag(), "residual blocks weigh their channels by what the whole image shows, as SENet's do"
    )
    stem_kernel: int = option(3, whole(most=31), "size of the first convolution's kernel, an odd number")
    downsample: int = option(0, whole(0), "how many of the stem's convolutions halve the image, from the first on")
    readout: str = option("concat", one_of(("concat", "mean")), "what is made of the branches' pooled features")
    head_width: int | None = option(
        None, optional(whole()), "units of a hidden layer before the last; none for no hidden layer"
    )
    pool: int = option(1, whole(), "height and width to which features are averaged before the last linear layer")
    dropout: float = option(0.0, number(0, 0.99, open_below=False), "share of features dropped before the last layer")

    def read_branches(self) -> int:
        """How many branches the head reads."""
        return 1

    def idle(self) -> dict[str, str]:
        return super().idle() | ({"readout": "on a single branch"} if self.read_branches() == 1 else {})


@dataclass(frozen=True, kw_only=True)
class SolvingOptions(Options):
    """Options of the equilibrium, its solver and its gradient."""

    hidden: tuple[int, ...] = option(
        (64,), wholes(longest=256), "channels of the state, one number a branch (or layer)"
    )
    activation: str = option("relu", one_of(penalties.names()), "the prox of the penalty in the objective")
    bound: float | None = option(0.95, optional(number()), "largest norm of every W; none lets it grow")
    weight_kernel: int = option(3, whole(most=31), "size of the kernels of W, an odd number; 1 mixes channels alone")
    injection_kernel: int = option(3, whole(most=31), "size of the kernels of U, an odd number")
    injection_norm: str = option(
        "none", one_of(("none", "batch", "group")), "normalisation of U x: none, over the batch, or over each sample"
    )
    solver: str = option(
        "anderson", one_of(("anderson", "picard", "broyden", "fista", "sam")), "how the equilibrium is found"
    )
    tol: float = option(
        1e-3,
        number(open_below=False),
        "relative residual at which a sample is finished; 0 takes exactly max_steps steps",
    )
    max_steps: int = option(40, whole(most=10**6), "steps of the solver at most")
    memory: int | None = option(None, optional(whole()), "steps that Anderson or Broyden remember; none for their own")
    damping: float | None = option(None, optional(number(0, 1)), "share of a new step; none for what the problem says")
    gradient: str = option(
        "implicit",
        one_of(("implicit", "phantom", "one-step", "unrolled", "shine")),
        "how the equilibrium is differentiated; implicit is exact",
    )
    gradient_tol: float = option(1e-3, number(), "residual of the implicit gradient's system, relative to the gradient")
    gradient_steps: int | None = option(
        None, optional(whole(most=10**6)), "steps of the gradient at most; none for its own number"
    )
    gradient_damping: float = option(0.8, number(0, 1), "damping of the phantom gradient's steps")
    feedback: str = option(
        "equilibrium",
        one_of(("equilibrium", "explicit", "none")),
        "none: one step, so that nothing comes back; explicit: two steps, a feed-forward network in which all "
        "parameters are at work; either replaces solver and gradient",
    )
    on_failure: str = option("warn", one_of(("warn", "raise", "ignore")), "what happens when samples do not converge")
    regularizer: str = option("none", one_of(REGULARIZERS), "a prior on features, in the objective or in SAM")
    regularizer_weight: float = option(0.01, number(), "its weight in the objective, or its step in SAM")

    sam_polish: int | None = option(
        None, optional(whole(0, most=10**6)), "plain steps at the end of SAM; none for half of max_steps"
    )
    sam_eta: float = option(0.5, number(0, 1), "scale of SAM's schedules")
    sam_rho: float = option(0.33, number(0, 1), "decay of SAM's share of steps on the regularizer")
    sam_c: float = option(0.33, number(0, 1), "decay of SAM's shrinkage; sam_rho + 2 sam_c should be below 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver != "sam":
            for name in ("sam_polish", "sam_eta", "sam_rho", "sam_c"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise UserError(f"{name} has no effect with solver={self.solver!r}; it belongs to solver='sam'")
        for name in ("weight_kernel", "injection_kernel"):
            if getattr(self, name) % 2 == 0:
                raise UserError(f"{name} should be odd, so that an image keeps its size; got {getattr(self, name)}")

    def idle(self) -> dict[str, str]:
        unused = super().idle()
        if self.gradient != "implicit":
            unused["gradient_tol"] = f"with gradient={self.gradient!r}; it belongs to gradient='implicit'"
        if self.gradient != "phantom":
            unused["gradient_damping"] = f"with gradient={self.gradient!r}; it belongs to gradient='phantom'"
        if self.regularizer == "none":
            unused["regularizer_weight"] = f"without a regularizer, one of {', '.join(REGULARIZERS[1:])}"
        return unused

    def layer(self, problem: Problem) -> Equilibrium:
        """The equilibrium layer of ``problem`` with this solver and gradient; without feedback, a few plain steps."""
        if self.feedback != "equilibrium":
            steps = _STEPS_WITHOUT_FEEDBACK[self.feedback]
            return Equilibrium(problem, Picard(tol=0, max_steps=steps), Unrolled(steps), self.on_failure)
        return Equilibrium(problem, self._solver(), self._gradient(), self.on_failure)

    def prior(self) -> Regularizer | None:
        """The regulariser, or None."""
        return None if self.regularizer == "none" else regularizers.get(self.regularizer)

    def prior_in_objective(self, takes_one: bool) -> Regularizer | None:
        """The regulariser in the objective; an error where it would have no effect."""
        prior = self.prior()
        if prior is None or self.solver == "sam":
            return None
        if not takes_one:
            raise UserError(
                f"regularizer={self.regularizer!r} has no place in this model's objective; use solver='sam', which "
                "selects by it among equilibria, or an OptEq model"
            )
        return prior

    def _solver(self) -> Solver:
        tol, steps = self.tol, self.max_steps
        if self.memory is not None and self.solver not in ("anderson", "broyden"):
            raise UserError(
                f"memory has no effect with solver={self.solver!r}; only anderson and broyden have a memory"
            )
        if self.solver == "anderson":
            return Anderson(tol=tol, max_steps=steps, memory=self.memory or Anderson.memory, damping=self.damping)
        if self.solver == "broyden":
            return Broyden(tol=tol, max_steps=steps, memory=self.memory or Broyden.memory, damping=self.damping)
        if self.solver == "fista":
            return FISTA(tol=tol, max_steps=steps, damping=self.damping)
        if self.solver == "picard":
            return Picard(tol=tol, max_steps=steps, damping=self.damping)
        prior = self.prior()
        if prior is None:
            raise UserError(
                "solver='sam' selects by a regularizer: set regularizer to ridge, l1, incay, decorrelation or hsic"
            )
        if self.damping is not None:
            raise UserError("damping has no effect with solver='sam'")
        # By default the last steps are plain ones, so that the result is close to an equilibrium.
        return SAM(
            tol=tol,
            max_steps=steps,
            regularizer=prior,
            gamma=self.regularizer_weight,
            eta=self.sam_eta,
            rho=self.sam_rho,
            c=self.sam_c,
            polish=steps // 2 if self.sam_polish is None else self.sam_polish,
        )

    def _gradient(self) -> Gradient:
        steps = self.gradient_steps
        if self.gradient == "implicit":
            return Implicit(tol=self.gradient_tol, max_steps=steps or 60)
        if self.gradient == "phantom":
            return Phantom(steps or Phantom.steps, self.gradient_damping)
        if self.gradient == "unrolled":
            return Unrolled(steps or Unrolled.steps)
        if steps is not None:
            raise UserError(f"gradient_steps has no effect with gradient={self.gradient!r}")
        return OneStep() if self.gradient == "one-step" else Shine()


@dataclass(frozen=True, kw_only=True)
class EquilibriumOptions(SolvingOptions, ClassifierOptions):
    """Options of stem, equilibrium and head."""


@dataclass(frozen=True, kw_only=True)
class BranchOptions(EquilibriumOptions):
    """Options of models with branches."""

    scales: tuple[int, ...] = option((1,), wholes(), "downsampling factor of each branch's input")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.scales) != len(self.hidden):
            raise UserError(
                f"hidden and scales should have one value per branch; got {len(self.hidden)} and {len(self.scales)}"
            )

    def read_branches(self) -> int:
        return len(self.scales)


__all__ = ["BranchOptions", "ClassifierOptions", "EquilibriumOptions", "Options", "SolvingOptions"]
