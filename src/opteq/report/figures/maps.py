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
from opteq.report.figures.style import CaptionedFigure, panels
from opteq.report.figures.subject import FigureUnavailableError, Subject

_COUNT = 6
_CELL = (1.7, 1.75)


def saliency(subject: Subject) -> CaptionedFigure:
    """Images with Grad-CAM and SmoothGrad of every run, and how much of each lies in its brightest tenth of pixels."""
    runs = (subject, *subject.beside)
    _, pixels, labels = subject.images(_COUNT)
    figure, axes = panels(1 + 2 * len(runs), len(pixels), _CELL)
    for column in range(len(pixels)):
        _show(axes[0, column], pixels[column])
    axes[0, 0].set_ylabel("image")
    words = []
    for place, one in enumerate(runs):
        x, own, _ = one.images(_COUNT)
        if one.classes != subject.classes or not torch.equal(own, pixels):
            raise FigureUnavailableError(f"{one.title} has other test images than {subject.title}")
        predicted, cam, smooth = _maps(one, x)
        for row, name, maps in ((1, "Grad-CAM", cam), (2, "SmoothGrad", smooth)):
            rows = axes[2 * place + row]
            rows[0].set_ylabel(name if len(runs) == 1 else f"{one.title}\n{name}")
            for column in range(len(pixels)):
                _show(rows[column], pixels[column])
                shown = _relative(maps[column]).numpy()
                rows[column].imshow(shown, cmap="inferno", alpha=0.6, extent=_extent(pixels[column]))
        for column, (found, true) in enumerate(zip(predicted.tolist(), labels.tolist(), strict=True)):
            title = one.classes[found] if found == true else f"{one.classes[found]} (is {one.classes[true]})"
            axes[2 * place + (1 if len(runs) > 1 else 0), column].set_title(title, fontsize=8)
        words.append(_concentrations(one, cam, smooth))
    return CaptionedFigure(
        figure,
        f"Where the evidence for the predicted class, written above, lies in {len(pixels)} test images: Grad-CAM over "
        "the last features, and the gradient by pixels averaged over noisy images (SmoothGrad); brighter is more. The "
        f"brightest tenth of the pixels holds {'; '.join(words)} (10 % would be an even map).",
    )


def _maps(subject: Subject, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Predicted classes, Grad-CAM and SmoothGrad."""
    subject.check_classifies()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        with torch.no_grad():
            predicted = subject.model(x).argmax(dim=1)
        try:
            cam = grad_cam(subject.model, x, predicted)
        except (TypeError, ValueError) as error:
            raise FigureUnavailableError(str(error)) from error
        return predicted, cam, saliency_map(subject.model, x, predicted)


def _concentrations(subject: Subject, cam: Tensor, smooth: Tensor) -> str:
    empty = int((cam.flatten(1).amax(dim=1) <= 0).sum())
    without = f", empty where no feature speaks for the class: {empty} of {len(cam)}" if empty else ""
    where = " at the equilibrium" if equilibria(subject.model) else ""
    grad_cam_share, smooth_share = f"{_concentration(cam):.0%}", f"{_concentration(smooth):.0%}"
    return f"{smooth_share} of SmoothGrad and {grad_cam_share} of Grad-CAM{where} ({subject.title}){without}"


def attention(subject: Subject) -> CaptionedFigure:
    """Images with the weights of GEQ's patches at the equilibrium."""
    x, pixels, _ = subject.images(_COUNT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        maps = model_attention(subject.model, x)
    if maps is None:
        raise FigureUnavailableError("only GEQ with a Gaussian kernel weighs patches")
    figure, axes = panels(2, len(x), _CELL)
    image: Any = None
    low, high = float(maps.min()), float(maps.max())
    for column in range(len(x)):
        _show(axes[0, column], pixels[column])
        image = axes[1, column].imshow(maps[column].float().cpu().numpy(), cmap="inferno", vmin=low, vmax=high)
        _bare(axes[1, column])
    axes[0, 0].set_ylabel("image")
    axes[1, 0].set_ylabel("weight of patches")
    figure.colorbar(image, ax=list(axes[1]), label="exp(-γ|q|²)")
    return CaptionedFigure(
        figure,
        f"The weights exp(-γ|q|²) of the patches at the equilibrium of {len(x)} test images, averaged over channel "
        f"groups and branches: 1 where the state matches the input, 0 where a patch is ignored. Here they lie between "
        f"{low:.2f} and {high:.2f}, {float(maps.mean()):.2f} on average.",
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
