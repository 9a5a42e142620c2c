"""The sections of a recipe: every option of a training run, typed and validated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from opteq.analysis import PGD
from opteq.data import Augmentation

Share = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


def fraction(value: Any) -> Any:
    """``"8/255"`` as a number, the usual notation for attacks; other values are returned unchanged.

    >>> fraction("1/4"), fraction("0.5"), fraction(0.5), fraction("1/0")
    (0.25, 0.5, 0.5, '1/0')
    """
    if isinstance(value, str):
        above, slash, below = value.partition("/")
        try:
            return float(above) / (float(below) if slash else 1.0)
        except (ValueError, ZeroDivisionError):
            return value  # for the type check to refuse
    return value


Pixels = Annotated[float, BeforeValidator(fraction), Field(ge=0, le=1)]
"""A distance for pixels in 0..1."""


def _as_toml(options: dict[str, Any]) -> dict[str, Any]:
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    return {name: "none" if value is None else value for name, value in plain.items()}


class Section(BaseModel):
    """A table of a recipe. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def refuse_idle(self, names: Iterable[str], where: str) -> None:
        """Raise where one of the options differs from its default: ``where`` says why it has no effect."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect {where}")


class ModelSection(Section):
    """The model: a name of :func:`opteq.models.list`, and options that differ from its defaults.

    Options are stored as TOML values, so that a recipe made in Python equals the one in its run's file: None, which
    TOML does not have, is ``"none"``, and tuples are lists.
    """

    name: str
    options: Annotated[dict[str, Any], AfterValidator(_as_toml)] = {}


class DataSection(Section):
    """The data set: a name of :func:`opteq.data.names`, its folder, the image size, and how images are read.

    With ``stream`` images are decoded when they are needed, by ``workers`` processes for each process that trains.
    """

    name: str
    root: str | None = None
    cache: str | None = None
    image_size: Count | None = None
    stream: bool = False
    workers: Annotated[int, Field(ge=0)] | None = None

    def arguments(self, root: str | None = None) -> dict[str, Any]:
        """The arguments of :func:`opteq.data.load`; ``root`` replaces the recipe's where it is given."""
        given = self.model_dump()
        return given if root is None else {**given, "root": root}


class TrainSection(Section):
    """Duration, device and precision.

    ``batch_size`` is the number of images of one optimiser step over all processes and micro-batches: neither the
    number of processes nor ``accumulate`` changes the result. (Batch normalisation is the exception: it uses the images
    of one micro-batch.) ``checkpoint_steps`` adds a checkpoint every that many steps to those at the end of every
    epoch; 0 adds none. ``threads`` is the number of CPU threads, torch's default if not given. Small images gain little
    from a second thread, and are much slower if another program uses its core. ``jacobian`` is the weight, in the loss,
    of the squared Frobenius norm of a step's Jacobian at the equilibrium per entry of the state; with
    ``jacobian_limit``, of how far its squared spectral radius exceeds that limit's square. ``radius`` limits that
    spectral radius itself: where a sample of a batch exceeds it, W is scaled down. With ``bound_start``, bounds on
    weights grow from there to the model's own within the first ``bound_epochs`` epochs. The first ``unrolled_epochs``
    epochs train by differentiating through ``unrolled_steps`` plain steps in place of the equilibrium.
    """

    epochs: Count
    batch_size: Count
    test_batch_size: Count = 256
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["no", "bf16", "fp16"] = "no"
    tf32: bool = True
    threads: Count | None = None
    accumulate: Count = 1
    clip: Positive | None = None
    label_smoothing: Share = 0.0
    jacobian: NotNegative = 0.0
    jacobian_limit: Positive | None = None
    radius: Annotated[float, Field(gt=0, lt=1)] | None = None
    bound_start: Positive | None = None
    bound_epochs: Count | None = None
    unrolled_epochs: Annotated[int, Field(ge=0)] = 0
    unrolled_steps: Count = 10
    drop_last: bool = False
    checkpoint_steps: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _parts_are_not_empty(self) -> TrainSection:
        if self.accumulate > self.batch_size:
            raise ValueError(f"accumulate = {self.accumulate} is more than batch_size = {self.batch_size}")
        if self.jacobian_limit is not None and not self.jacobian:
            raise ValueError("jacobian_limit has no effect without jacobian, the weight of the penalty")
        if self.radius is not None and self.precision == "fp16":
            raise ValueError("radius skips steps, which the scaling of losses in fp16 does by itself; use bf16 or no")
        if self.radius is not None and self.jacobian:
            raise ValueError("radius and jacobian exclude each other: both limit feedback; leave out one of them")
        if (self.bound_start is None) != (self.bound_epochs is None):
            raise ValueError("bound_start and bound_epochs go together: where bounds begin, and for how long they grow")
        if self.bound_epochs is not None and self.bound_epochs >= self.epochs:
            raise ValueError(f"bound_epochs = {self.bound_epochs} should be below epochs = {self.epochs}")
        if self.unrolled_epochs > self.epochs:
            raise ValueError(f"unrolled_epochs = {self.unrolled_epochs} should be at most epochs = {self.epochs}")
        if self.unrolled_epochs and self.radius is not None:
            raise ValueError("radius and unrolled_epochs exclude each other: unrolled steps reach no equilibrium")
        return self


class OptimizerSection(Section):
    """SGD or AdamW. ``decay_all = false`` excludes biases and normalisation layers from weight decay."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: Positive
    momentum: Share = 0.9
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.999)
    eps: Positive = 1e-8
    decay_all: bool = True

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> OptimizerSection:
        if self.name == "adamw":
            self.refuse_idle(("momentum", "nesterov"), 'with name = "adamw"; it belongs to "sgd"')
        else:
            self.refuse_idle(("betas", "eps"), 'with name = "sgd"; it belongs to "adamw"')
        if self.weight_decay == 0:
            self.refuse_idle(("decay_all",), "with weight_decay = 0, the decay of all that it spares")
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov = true needs a momentum above 0")
        return self


_SCHEDULES_WITH = {
    "warmup": ("constant", "step", "poly", "cosine"),
    "milestones": ("step",),
    "every": ("step",),
    "factor": ("step",),
    "rise": ("one-cycle",),
    "start": ("one-cycle",),
    "final": ("cosine", "one-cycle"),
    "power": ("poly",),
}


class ScheduleSection(Section):
    """The learning-rate schedule; see :mod:`opteq.training.optim.schedules`.

    ``warmup``, ``milestones`` and ``every`` are in epochs; ``start`` and ``final`` are fractions of ``lr``.
    """

    name: Literal["constant", "step", "cosine", "one-cycle", "poly"] = "constant"
    warmup: NotNegative = 0.0
    milestones: list[Count] = []
    every: Count | None = None
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    rise: Annotated[float, Field(gt=0, lt=1)] = 0.3
    start: Annotated[float, Field(gt=0, le=1)] = 0.04
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    power: Positive = 0.9

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> ScheduleSection:
        for name, owners in _SCHEDULES_WITH.items():
            if self.name not in owners:
                self.refuse_idle((name,), f'with name = "{self.name}"; it belongs to "{owners[-1]}"')
        if self.name == "step" and bool(self.milestones) == bool(self.every):
            raise ValueError('name = "step" needs either milestones = [epochs, ...] or every = epochs')
        if sorted(set(self.milestones)) != self.milestones:
            raise ValueError(f"milestones = {self.milestones} should increase")
        return self


class LossSection(Section):
    """Terms added to the cross-entropy; see :mod:`opteq.training.optim.losses`."""

    regularizer: Literal["ridge", "l1", "incay", "decorrelation", "hsic"] | None = None
    weight: NotNegative = 0.0
    augmented: NotNegative = 0.0
    diversity: NotNegative = 0.0
    smoothing: NotNegative = 0.0
    normalised: bool = True

    @model_validator(mode="after")
    def _weights_have_something_to_weigh(self) -> LossSection:
        if (self.regularizer is None) != (self.weight == 0):
            raise ValueError(f"regularizer = {self.regularizer!r} with weight = {self.weight}: give both or neither")
        if self.augmented == 0 and not self.normalised:
            raise ValueError("normalised = false has no effect with augmented = 0, whose features it would normalise")
        for name in ("diversity", "smoothing"):
            if self.augmented == 0:
                where = f"with augmented = 0, the weight of its loss; MOptEq's own is model.options.{name}"
                self.refuse_idle((name,), where)
        return self


class AdversarySection(Section):
    """Adversarial training with :class:`opteq.analysis.PGD`; ``epsilon = 0``, the default, turns it off.

    At every step the training images are attacked with ``steps`` gradient steps, from a start that depends only on
    seed, epoch and batch. Every ``test_every`` epochs, and after the last, the test images are attacked with
    ``test_steps``
    steps: ``test_robust_accuracy``. Distances are for pixels in 0..1 and may be fractions such as ``"8/255"``; step
        sizes
    are 2.5 epsilon / steps by default.
    """

    epsilon: Pixels = 0.0
    norm: Literal["linf"] = "linf"
    steps: Count = 7
    step_size: Annotated[Pixels, Field(gt=0)] | None = None
    random_start: bool = True
    test_steps: Count = 20
    test_step_size: Annotated[Pixels, Field(gt=0)] | None = None
    test_every: Count = 10

    @model_validator(mode="after")
    def _has_a_ball(self) -> AdversarySection:
        if self.epsilon == 0:
            self.refuse_idle(type(self).model_fields, "with epsilon = 0; give epsilon, such as 8/255")
        return self

    def training(self) -> PGD | None:
        """The attack on training images."""
        return PGD(self.epsilon, self.steps, self.step_size, self.random_start) if self.epsilon else None

    def testing(self) -> PGD | None:
        """The attack on test images."""
        return PGD(self.epsilon, self.test_steps, self.test_step_size, self.random_start) if self.epsilon else None


class GuardSection(Section):
    """Conditions under which a run stops itself; see :mod:`opteq.training.guard`."""

    residual: Positive = 0.1
    lost: Annotated[float, Field(ge=0, le=1)] = 0.5
    converged: Annotated[float, Field(ge=0, le=1)] = 0.0
    skipped: Count = 20
    every: Count = 50


def _augment_section() -> type[Section]:
    """A table with the fields of :class:`opteq.data.Augmentation`."""
    hints = get_type_hints(Augmentation)
    fields: dict[str, Any] = {
        field.name: (hints[field.name], field.default) for field in dataclasses.fields(Augmentation)
    }

    def checked(section: Section) -> Section:
        # The table checks types, the class checks values and their combinations.
        Augmentation(**section.model_dump())
        return section

    return create_model(
        "AugmentSection",
        __base__=Section,
        __doc__="Data augmentation: the fields of opteq.data.Augmentation.",
        __validators__={"checked": model_validator(mode="after")(checked)},  # type: ignore[dict-item]
        **fields,
    )


AugmentSection = _augment_section()


class Recipe(Section):
    """All options of a run. The same recipe on the same CPU gives bitwise equal weights.

    >>> recipe = Recipe.model_validate({
    ...     "name": "tiny", "model": {"name": "opteq-digits"}, "data": {"name": "digits"},
    ...     "train": {"epochs": 2, "batch_size": 64}, "optimizer": {"lr": 0.1},
    ... })
    >>> recipe.schedule.name, recipe.train.seed
    ('constant', 0)
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    reproduces: str = ""
    model: ModelSection
    data: DataSection
    augment: AugmentSection = AugmentSection()  # type: ignore[valid-type]
    train: TrainSection
    optimizer: OptimizerSection
    schedule: ScheduleSection = ScheduleSection()
    loss: LossSection = LossSection()
    adversary: AdversarySection = AdversarySection()
    guard: GuardSection = GuardSection()

    def augmentation(self) -> Augmentation:
        """The ``[augment]`` table as an :class:`opteq.data.Augmentation`."""
        return Augmentation(**self.augment.model_dump())  # type: ignore[attr-defined]
