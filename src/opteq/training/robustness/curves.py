"""Accuracy against the radius and the steps of attacks, and certified accuracy against the radius."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opteq.analysis import APGD, PGD
from opteq.analysis.certified_radius import CertifiedClassifier
from opteq.common.errors import ConvergenceWarning, UserError
from opteq.data import Split
from opteq.models import Classifier
from opteq.training.open_run import LoadedRun, set_solvers
from opteq.training.run import rng

EPSILON = 8 / 255
"""Usual radius for CIFAR."""
SHARES = (0.125, 0.25, 0.5, 1.0, 1.5, 2.0)
"""Radii of the curve, in units of the radius asked for."""
STEPS = (1, 2, 3, 5, 7, 10, 20, 50, 100)
"""Steps of the curve; those above the number asked for are left out."""
RADII = (0.0, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Euclidean radii of the certified curve, for pixels in 0..1."""
TOL = 1e-6
"""Tolerance of the equilibria that are certified: statements are about exact ones."""
CHUNK = 64
"""Images that are certified at a time: bounds at a point keep many states in memory."""

Say = Callable[[str], None]


def measure_curves(
    opened: LoadedRun, split: Split, epsilon: float = EPSILON, steps: int = 20, say: Say = lambda _: None
) -> dict[str, Any]:
    """Accuracy under PGD and APGD against radius and steps, and certified accuracy, in a form that JSON takes.

    Args:
        opened: the run.
        split: the images.
        epsilon: largest change of a pixel, for pixels in 0..1: radius of the curve over steps, middle of the other.
        steps: of every attack in the curve over the radius, and the most in the other.
        say: gets a line after each point.

    Returns:
        ``radius`` and ``steps``, each with its axis and the accuracies ``pgd`` and ``apgd``; ``certified`` with
        ``radii`` (Euclidean), ``accuracy``, ``source`` and ``probability``, or with the ``reason`` why there is none.
    """
    clean = opened.counts(split).accuracy

    def accuracies(pairs: Sequence[tuple[float, int]]) -> dict[str, list[float]]:
        curves: dict[str, list[float]] = {"pgd": [], "apgd": []}
        for radius, count in pairs:
            for name, attack in (("pgd", PGD(radius, count)), ("apgd", APGD(radius, count))):
                curves[name].append(opened.counts(split, attack).accuracy)
            last = f"PGD {curves['pgd'][-1]:.1%}, APGD {curves['apgd'][-1]:.1%}"
            say(f"attack of {255 * radius:.3g}/255, steps {count}: accuracy under {last}")
        return curves

    radii = [share * epsilon for share in SHARES if share * epsilon <= 1]
    counts = sorted({count for count in STEPS if count < steps} | {steps})
    over_radius = accuracies([(radius, steps) for radius in radii])
    over_steps = accuracies([(epsilon, count) for count in counts])
    return {
        "clean": clean,
        "images": len(split),
        "norm": "linf",
        "radius": {
            "radii": [0.0, *radii],
            "steps": steps,
            **{name: [clean, *values] for name, values in over_radius.items()},
        },
        "steps": {"steps": counts, "epsilon": epsilon, **over_steps},
        "certified": certified_accuracy(opened, split, say),
        **opened.settings,
    }


@torch.no_grad()
def certified_accuracy(opened: LoadedRun, split: Split, say: Say = lambda _: None) -> dict[str, Any]:
    """The share of images that are classified rightly wherever they move within a radius, by proof."""
    accelerator = opened.accelerator
    model = accelerator.unwrap_model(opened.model)
    assert isinstance(model, Classifier)
    solvers = [(layer, layer.solver, layer.gradient) for layer in _layers(model)]
    set_solvers(model, TOL, None)
    counts = torch.zeros(len(RADII) + 1, dtype=torch.float64, device=accelerator.device)
    source, probability = "weights", 1.0
    try:
        batches = opened.batches(split)
        certify = CertifiedClassifier(model, tuple(batches.std))
        with rng.preserve_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            for images, labels in batches.epoch(0):
                for x, truth in zip(torch.split(images, CHUNK), torch.split(labels, CHUNK), strict=True):
                    if len(truth):
                        certified = certify(x)
                        source, probability = certified.source, certified.probability
                        counts += _counted(certified.radius, certified.predicted == truth)
    except UserError as error:
        return {"reason": str(error)}
    finally:
        for layer, solver, gradient in solvers:
            layer.solver, layer.gradient = solver, gradient
    if accelerator.num_processes > 1:
        counts = accelerator.reduce(counts, "sum")
    *right, total = counts.tolist()
    accuracy = [one / max(total, 1) for one in right]
    say(f"certified accuracy: {accuracy[RADII.index(0.01)]:.1%} at a Euclidean radius of 0.01")
    return {"radii": list(RADII), "accuracy": accuracy, "source": source, "probability": probability, "tol": TOL}


def _counted(radius: Tensor, right: Tensor) -> Tensor:
    """How many of these images are right and certified at each radius, and how many there are."""
    levels = torch.tensor(RADII, dtype=torch.float64, device=radius.device)
    held = right[:, None] & ((radius[:, None].double() > levels) | (levels == 0))
    return torch.cat([held.sum(dim=0), torch.full_like(held.sum(), held.shape[0])[None]]).double()


def _layers(model: Classifier) -> list[Any]:
    from opteq.models import equilibria

    return [layer for _, layer in equilibria(model)]
