"""Maps over images: Grad-CAM beside SmoothGrad (GEQ, Figure 3), and the attention of GEQ's patches."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from opteq.analysis.grad_cam import grad_cam
from opteq.analysis.saliency import saliency_map
from opteq.common.errors import ConvergenceWarning
from opteq.models import equilibria
from opteq.report.examples import model_attention
from opteq.report.figures.style import Drawn, panels
from opteq.report.figures.subject import DoesNotFitError, Subject

_COUNT = 6
_CELL = (1.7, 1.75)


def saliency(subject: Subject) -> Drawn:
    """Images with Grad-CAM and SmoothGrad, and how much of each lies in the brightest tenth of the pixels."""
    subject.check_classifies()
    x, pixels, labels = subject.images(_COUNT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        with torch.no_grad():
            predicted = subject.model(x).argmax(dim=1)
        try:
            cam = grad_cam(subject.model, x, predicted)
        except (TypeError, ValueError) as error:
            raise DoesNotFitError(str(error)) from error
        smooth = saliency_map(subject.model, x, predicted)
    figure, axes = panels(3, len(x), _CELL)
    for column in range(len(x)):
        name = subject.classes[int(predicted[column])]
        right = bool(predicted[column] == labels[column])
        _show(axes[0, column], pixels[column])
        axes[0, column].set_title(name if right else f"{name} (is {subject.classes[int(labels[column])]})", fontsize=8)
        for row, one in ((1, cam), (2, smooth)):
            _show(axes[row, column], pixels[column])
            axes[row, column].imshow(
                _relative(one[column]).numpy(), cmap="inferno", alpha=0.6, extent=_extent(pixels[column])
            )
    for row, name in enumerate(("image", "Grad-CAM", "SmoothGrad")):
        axes[row, 0].set_ylabel(name)
    where = "features at the equilibrium" if equilibria(subject.model) else "last features"
    empty = int((cam.flatten(1).amax(dim=1) <= 0).sum())
    without = f" In {empty} of them no feature speaks for the class: their Grad-CAM is empty." if empty else ""
    return Drawn(
        figure,
        f"Where the evidence for the predicted class lies in {len(x)} test images: Grad-CAM over the {where}, and the "
        "gradient by pixels averaged over noisy images (SmoothGrad); brighter is more. The brightest tenth of the "
        f"pixels holds {_concentration(cam):.0%} of Grad-CAM and {_concentration(smooth):.0%} of SmoothGrad (10 % "
        f"would be an even map).{without}",
    )


def attention(subject: Subject) -> Drawn:
    """Images with the weights of GEQ's patches at the equilibrium."""
    x, pixels, _ = subject.images(_COUNT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = model_attention(subject.model, x)
    if found is None:
        raise DoesNotFitError("only GEQ with a Gaussian kernel weighs patches")
    figure, axes = panels(2, len(x), _CELL)
    image: Any = None
    low, high = float(found.min()), float(found.max())
    for column in range(len(x)):
        _show(axes[0, column], pixels[column])
        image = axes[1, column].imshow(found[column].float().cpu().numpy(), cmap="inferno", vmin=low, vmax=high)
        _bare(axes[1, column])
    axes[0, 0].set_ylabel("image")
    axes[1, 0].set_ylabel("weight of patches")
    figure.colorbar(image, ax=list(axes[1]), label="exp(-γ|q|²)")
    return Drawn(
        figure,
        f"The weights exp(-γ|q|²) of the patches at the equilibrium of {len(x)} test images, averaged over channel "
        f"groups and branches: 1 where the state matches the input, 0 where a patch is ignored. Here they lie between "
        f"{low:.2f} and {high:.2f}, {float(found.mean()):.2f} on average.",
    )


def _show(axes: Any, pixels: Tensor) -> None:
    image = pixels.movedim(0, -1).numpy() if pixels.shape[0] == 3 else pixels[0].numpy()
    axes.imshow(image, cmap="gray", vmin=0, vmax=255, extent=_extent(pixels))
    _bare(axes)


def _bare(axes: Any) -> None:
    axes.set(xticks=[], yticks=[])


def _extent(pixels: Tensor) -> tuple[float, float, float, float]:
    return (0.0, float(pixels.shape[2]), float(pixels.shape[1]), 0.0)


def _relative(one: Tensor) -> Tensor:
    """A map from 0 to 1."""
    one = one.float().cpu()
    return (one - one.min()) / (one.max() - one.min()).clamp_min(1e-12)


def _concentration(maps: Tensor) -> float:
    """The share of a map that lies in its brightest tenth of pixels, on average over those that are not empty."""
    flat = maps.float().flatten(1)
    flat = flat[flat.sum(dim=1) > 0]
    if not len(flat):
        return 0.0
    top = flat.topk(max(1, flat.shape[1] // 10), dim=1).values.sum(dim=1)
    return float((top / flat.sum(dim=1)).mean())
