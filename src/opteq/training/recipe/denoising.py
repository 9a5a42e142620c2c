"""The recipe of a denoiser: every option of its training and its tests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from opteq.models.denoiser import DenoiserConfig
from opteq.training.recipe.sections import Count, NotNegative, Positive, Section, Share


class NoiseSection(Section):
    """The noise levels that a model is trained for, of 255; each image of a batch has its own."""

    least: Positive = 10.0
    most: Positive = 55.0

    @model_validator(mode="after")
    def _is_a_range(self) -> NoiseSection:
        if self.least >= self.most:
            raise ValueError(f"least = {self.least:g} should be less than most = {self.most:g}")
        return self


class PriorSection(Section):
    """The prior: see :class:`~opteq.models.denoiser.DenoiserConfig`; ``width`` is the number of filters.

    With ``steps`` above 0 the denoiser takes that many plain steps in place of the minimiser.
    """

    name: Literal["denoiser"] = "denoiser"
    width: Count = 56
    kernel_size: Count = 5
    knots: Count = 24
    rho: NotNegative = 1.0
    mu: Positive = 10.0
    margin: Share = 0.01
    steepest: Positive = 50.0
    guide: Annotated[int, Field(ge=0)] = 0
    depth: Count = 3
    repeats: Count = 4
    steps: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _has_a_middle(self) -> PriorSection:
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size = {self.kernel_size} should be odd")
        return self

    def config(self, noise: NoiseSection) -> DenoiserConfig:
        """The model's configuration for these noise levels."""
        return DenoiserConfig(
            channels=(1, 4, 8, self.width), kernel_size=self.kernel_size, knots=self.knots, rho=self.rho, mu=self.mu,
            margin=self.margin, steepest=self.steepest, guide=self.guide, depth=self.depth, repeats=self.repeats,
            steps=self.steps, least=noise.least / 255, most=noise.most / 255,
        )  # fmt: skip


class ImageSection(Section):
    """The images: a folder with a folder ``train``, and one for every test set."""

    name: Literal["grey"] = "grey"
    root: str | None = None


class DenoisingTrainSection(Section):
    """Length of training, batches, and how the energy is minimised on the way.

    ``bfloat16`` is for the network that guides a prior, not for the energy.
    ``border`` pixels at each side of a patch do not count in the loss: there the image ends where a real one goes on.
    """

    steps: Count
    batch_size: Count = 128
    patch: Count = 40
    border: Annotated[int, Field(ge=0)] = 6
    lr: Positive = 4e-3
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tf32: bool = False
    bfloat16: bool = False
    threads: Count | None = None
    tol: Positive = 1e-4
    max_steps: Count = 120
    gradient_tol: Positive = 1e-3
    gradient_steps: Count = 60
    log_steps: Count = 100
    checkpoint_steps: Count = 500

    @model_validator(mode="after")
    def _something_counts(self) -> DenoisingTrainSection:
        if 2 * self.border >= self.patch:
            raise ValueError(f"border = {self.border} leaves nothing of patch = {self.patch}")
        return self


class DenoisingTestSection(Section):
    """Test sets (folders), noise levels of 255, and how far the energy is minimised.

    The levels are by default those of 15, 25 and 50 that are trained for, or the largest one where none of them is.
    """

    sets: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("set12", "bsd68")
    sigmas: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)] = (15.0, 25.0, 50.0)
    tol: Positive = 1e-4
    max_steps: Count = 400


class DenoisingRecipe(Section):
    """All options of the training of a denoiser. The same recipe on the same CPU gives bitwise equal weights.

    >>> recipe = DenoisingRecipe.model_validate({"name": "mine", "task": "denoising", "train": {"steps": 100}})
    >>> recipe.train.patch
    40
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    task: Literal["denoising"]
    reproduces: str = ""
    model: PriorSection = PriorSection()
    data: ImageSection = ImageSection()
    noise: NoiseSection = NoiseSection()
    train: DenoisingTrainSection
    test: DenoisingTestSection = DenoisingTestSection()

    @model_validator(mode="after")
    def _tests_what_is_trained_for(self) -> DenoisingRecipe:
        if "sigmas" not in self.test.model_fields_set:
            least, most = self.noise.least, self.noise.most
            sigmas = tuple(sigma for sigma in self.test.sigmas if least <= sigma <= most) or (most,)
            object.__setattr__(self, "test", self.test.model_copy(update={"sigmas": sigmas}))
        return self

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> DenoisingRecipe:
        if not self.model.guide and self.train.bfloat16:
            raise ValueError("train.bfloat16 is for the network that guides a prior, and model.guide is 0")
        for name in ("depth", "repeats") if not self.model.guide else ():
            if getattr(self.model, name) != getattr(PriorSection(), name):
                raise ValueError(f"model.{name} is of the network that guides a prior, and model.guide is 0")
        if self.model.steps:
            names = ("tol", "max_steps", "gradient_tol", "gradient_steps")
            self.train.refuse_idle(names, f"with model.steps = {self.model.steps}, a fixed number of steps")
            self.test.refuse_idle(names[:2], f"in [test] with model.steps = {self.model.steps}")
        return self
