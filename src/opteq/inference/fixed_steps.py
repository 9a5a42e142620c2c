"""A model whose equilibria are a fixed number of plain steps: what can be exported, and compiled as one graph."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from opteq.common.errors import UserError
from opteq.equilibrium import Equilibrium
from opteq.models.classifier import Classifier
from opteq.models.comparators.neural_ode import NeuralODE
from opteq.models.denoiser import Denoiser
from opteq.models.prediction import Preprocessing
from opteq.operators import Operator
from opteq.operators.chain import ChainMap
from opteq.problems import Problem
from opteq.problems.hidden import BoundMap
from opteq.solvers import Picard
from opteq.states import State, blocks, inner, like


class FixedSteps(nn.Module):
    """``K`` plain steps ``y <- y + damping (T(y) - y)`` from the usual start, then the features: no loop over data.

    It computes what an :class:`~opteq.Equilibrium` with ``Picard(tol=0, max_steps=K)`` does. The operators' bounded
    weights are constants. There is no gradient.

    Args:
        problem: of the layer; its operators are frozen in place.
        steps: K.
        momentum: take step k from ``y_k + k / (k + 3) (y_k - y_{k-1})``, as FISTA without restarts does.
    """

    def __init__(self, problem: Problem, steps: int, momentum: bool = False) -> None:
        super().__init__()
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise UserError(f"the number of steps should be a whole number of at least 1; got {steps!r}")
        self.problem = problem
        self.steps = steps
        self.momentum = momentum
        self.residual: Tensor | None = None
        """Relative residual of the last call's answer, ``(B,)``, where ``measure`` is set: one more step."""
        self.measure = False
        for part in problem.modules():
            if isinstance(part, Operator):
                _freeze(part)

    def forward(self, x: State) -> State:
        """The features after K steps."""
        hidden = self.problem.bind(x)
        y = ahead = hidden.start()
        for k in range(self.steps):
            y, ahead = _step(hidden, y, ahead, k if self.momentum else 0)
        if self.measure:
            self.residual = _residual(hidden, y)
        return hidden.features(y)


class Exportable(nn.Module):
    """A classifier for pixels in 0..1: normalisation, stem, plain steps, head. The model itself is left as it is.

    Args:
        model: in any mode; the copy is in evaluation mode.
        steps: plain steps of every equilibrium layer.

    >>> import opteq.models
    >>> model = opteq.models.create("opteq-digits", in_channels=1)
    >>> Exportable(model, steps=20)(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Classifier, steps: int) -> None:
        super().__init__()
        preprocessing = Preprocessing.of(model.config)
        if any(isinstance(part, NeuralODE) for part in model.modules()):
            raise UserError(
                f"{model.config['name']} can't be exported: its ODE solver chooses its steps by the images, and a file "
                "has a fixed number of them"
            )
        copied = copy.deepcopy(model).eval().requires_grad_(False)
        self.layers = _replace_equilibria(copied, steps)
        self.model: Classifier = copied
        for name, values in (("mean", preprocessing.mean), ("std", preprocessing.std)):
            self.register_buffer(name, torch.tensor(values).reshape(-1, 1, 1).to(next(copied.parameters())))

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits ``(B, classes)`` of images ``(B, channels, h, w)`` with pixels in 0..1."""
        logits: Tensor = self.model((pixels - self.mean) / self.std)
        return logits

    @torch.no_grad()
    def residual(self, pixels: Tensor) -> Tensor:
        """The largest relative residual of the layers after their steps, ``(B,)``; zeros without any."""
        for layer in self.layers:
            layer.measure = True
        try:
            self(pixels)
            residuals = [layer.residual for layer in self.layers if layer.residual is not None]
        finally:
            for layer in self.layers:
                layer.measure, layer.residual = False, None
        return torch.stack(residuals).amax(dim=0) if residuals else pixels.new_zeros(len(pixels))


class ExportableDenoiser(nn.Module):
    """A denoiser by a fixed number of steps, for grey images of any size. The model itself is left as it is.

    Args:
        model: whose energy is minimised.
        steps: with momentum; plain ones where the model itself takes a fixed number of them.

    >>> import opteq.models
    >>> model = opteq.models.Denoiser.load("denoiser-convex")
    >>> ExportableDenoiser(model, steps=3)(torch.rand(2, 1, 16, 20), torch.tensor([0.1, 0.05])).shape
    torch.Size([2, 1, 16, 20])
    """

    def __init__(self, model: Denoiser, steps: int) -> None:
        super().__init__()
        copied = copy.deepcopy(model).eval().requires_grad_(False)
        self.layer = FixedSteps(copied.layer.problem, steps, momentum=not model.config.steps)

    def forward(self, pixels: Tensor, sigma: Tensor) -> Tensor:
        """Images ``(B, 1, h, w)`` for noisy ones and noise levels ``(B,)``."""
        image = self.layer((pixels, sigma))
        assert isinstance(image, Tensor)
        return image

    @torch.no_grad()
    def residual(self, pixels: Tensor, sigma: Tensor) -> Tensor:
        """The relative residual after the steps, ``(B,)``."""
        self.layer.measure = True
        try:
            self(pixels, sigma)
            assert self.layer.residual is not None
            return self.layer.residual
        finally:
            self.layer.measure, self.layer.residual = False, None


@torch.no_grad()
def enough_steps_to_denoise(model: Denoiser, pixels: Tensor, sigma: Tensor, tol: float = 1e-4, most: int = 500) -> int:
    """The number of steps that minimise the energy of these images to a relative residual; as trained where fixed."""
    if model.config.steps:
        return model.config.steps
    hidden = model.layer.problem.bind((pixels, sigma))
    y = ahead = hidden.start()
    for k in range(most):
        y, ahead = _step(hidden, y, ahead, k)
        if bool((_residual(hidden, y) <= tol).all()):
            return k + 1
    raise UserError(f"{most} steps do not reach the residual {tol:g}; give a number of them with --steps")


@torch.no_grad()
def enough_steps(model: Classifier, pixels: Tensor, most: int = 500) -> int:
    """The number of plain steps that bring every layer within its own tolerance for these images."""
    copied = copy.deepcopy(model).eval()
    preprocessing = Preprocessing.of(model.config)
    layers = [part for part in copied.modules() if isinstance(part, Equilibrium)]
    for layer in layers:
        layer.solver = Picard(tol=layer.solver.tol or 1e-3, max_steps=most)
        layer.on_failure = "ignore"
    mean, std = (torch.tensor(v).reshape(-1, 1, 1).to(pixels) for v in (preprocessing.mean, preprocessing.std))
    copied((pixels - mean) / std)
    reports = [layer.last[0] for layer in layers if layer.last is not None]
    for report in reports:
        if not bool(report.converged.all()):
            raise UserError(
                f"plain steps do not reach the tolerance {report.tol:g} within {most} steps (residual "
                f"{float(report.residual.max()):.1e}); give a number of them with --steps, and look at what it costs"
            )
    return max((int(report.steps.max()) for report in reports), default=1)


def _replace_equilibria(model: nn.Module, steps: int) -> list[FixedSteps]:
    layers = []
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Equilibrium):
                layers.append(FixedSteps(child.problem, steps))
                setattr(parent, name, layers[-1])
    return layers


def _freeze(operator: Operator) -> None:
    """Make ``prepare`` return one map, with constant weights: bounds are not part of an exported graph."""
    with torch.no_grad():
        prepared = operator.prepare()
    for name, value in vars(prepared).items():
        if isinstance(value, Tensor):
            setattr(prepared, name, value.detach().clone())
    if isinstance(prepared, ChainMap):  # composed in float64, for which ONNX Runtime has no convolution on a CPU
        with torch.no_grad():
            kernel = prepared.composed_kernel()
        prepared.__dict__["composed_kernel"] = lambda: kernel

    def prepare() -> Any:
        return prepared

    operator.__dict__["prepare"] = prepare


def _step(hidden: BoundMap, y: State, ahead: State, k: int) -> tuple[State, State]:
    """The step from ``ahead``, and where the next one is taken: further along by ``k / (k + 3)``."""
    image = _damped(ahead, hidden.step(ahead), hidden.damping)
    if k == 0:
        return image, image
    pairs = zip(blocks(image), blocks(y), strict=True)
    return image, like(image, tuple(a + k / (k + 3) * (a - b) for a, b in pairs))


def _residual(hidden: BoundMap, y: State) -> Tensor:
    """``|T(y) - y| / |T(y)|``, per sample."""
    image = hidden.step(y)
    change = like(y, tuple(a - b for a, b in zip(blocks(image), blocks(y), strict=True)))
    return (inner(change, change) / inner(image, image).clamp_min(1e-30)).sqrt()


def _damped(y: State, image: State, damping: float | Tensor) -> State:
    if isinstance(damping, float | int):
        if damping == 1:
            return image
        return like(y, tuple(torch.lerp(a, b, damping) for a, b in zip(blocks(y), blocks(image), strict=True)))
    pairs = zip(blocks(y), blocks(image), strict=True)
    return like(y, tuple(a + damping.reshape(-1, *[1] * (a.ndim - 1)).to(a) * (b - a) for a, b in pairs))
