"""Evaluation of a trained model on its test images."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from opteq.analysis import PGD
from opteq.common.errors import UserError
from opteq.training.certified import CertifiedShare
from opteq.training.feature_size import FeatureSize
from opteq.training.metrics import Metrics
from opteq.training.open_run import LoadedRun, open_run
from opteq.training.recipe.sections import AdversarySection, fraction


def evaluate(
    run: str | Path,
    tol: float | None = None,
    max_steps: int | None = None,
    device: str = "auto",
    precision: str | None = None,
    root: str | None = None,
    attack: float | str | None = None,
    attack_steps: int | None = None,
    attack_step_size: float | str | None = None,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Test the model of a finished run on all test images, and write ``evaluation.json`` beside it.

    Args:
        run: the run's folder.
        tol: solve every equilibrium to this relative residual instead of the model's own. If the accuracy stays the
            same, it does not depend on where the solver stopped.
        max_steps: maximal number of solver steps; with ``tol``, 500 by default.
        device: ``auto``, ``cpu`` or ``cuda``.
        precision: the recipe's by default; with ``tol``, float32 without TensorFloat-32, since rounding limits the
            residual to about 1e-2 in bfloat16 and 1e-3 in TensorFloat-32.
        root: folder of the images, if it differs from the recipe's.
        attack: also test under a :class:`opteq.analysis.PGD` attack of this radius, for pixels in 0..1; a number or a
            fraction such as ``"8/255"``. By default the recipe's ``[adversary]``; 0 for no attack.
        attack_steps: steps of the attack; the recipe's ``adversary.test_steps`` by default.
        attack_step_size: length of a step; 2.5 attack / attack_steps by default.
        batch_size: images at a time, the recipe's ``train.test_batch_size`` by default; fewer take less memory.

    Returns:
        ``test_accuracy`` and, with more than five classes, ``test_top5`` (0..1), ``test_loss``, ``samples``,
        ``solver_steps`` (mean), and over all test samples ``worst_residual``, ``mean_residual``, ``converged``
        (share) and ``certified`` (the share that
        converged to an equilibrium which is certified, by the weights or at the point, see
        :class:`~opteq.training.certified.CertifiedShare`; None where unknown), ``feature_abs`` and ``feature_square``
        (the means of ``|z|`` and ``z^2`` over the entries of all features), with the settings. With an attack
        also ``test_robust_accuracy``, ``test_robust_loss`` and ``attack``, its settings; for data sets with unseen
        sub-classes ``unseen_accuracy`` and ``unseen_loss``. For segmentation ``test_accuracy`` is the accuracy of
        pixels, and ``test_iou`` (mean intersection over union) and ``test_class_accuracy`` (mean over classes) replace
        ``test_top5``.
    """
    opened = open_run(run, tol, max_steps, device, precision, root, batch_size)
    pgd = _attack(opened.recipe.adversary, attack, attack_steps, attack_step_size)
    if opened.dataset.test.dense and pgd is not None:
        raise UserError("--attack: attacks need a classifier of images, and this data set is for segmentation")
    opened.check_writable("evaluation.json")
    result = _measured(opened, pgd)
    opened.write("evaluation.json", json.dumps(_as_json(result), indent=2) + "\n")
    return result


def _as_json(result: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: values that are not finite become null, as in ``metrics.jsonl``."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in result.items()
    }


def _measured(opened: LoadedRun, attack: PGD | None) -> dict[str, Any]:
    """The metrics of the test split with the settings, then of the unseen split and under attack."""
    dataset, accelerator = opened.dataset, opened.accelerator
    certified = CertifiedShare(accelerator.unwrap_model(opened.model), accelerator.device)
    sizes = FeatureSize(accelerator.unwrap_model(opened.model), accelerator.device)
    with certified.counting(), sizes.counting():
        counts = opened.counts(dataset.test)
    share = {"certified": certified.share(accelerator), **sizes.means(accelerator)}
    figures = _figures(counts, dataset.test.dense)
    if len(dataset.classes) <= 5:  # all classes are among the first five
        figures.pop("test_top5", None)
    result = {**figures, **share, **opened.settings}
    if dataset.unseen is not None:
        unseen = opened.counts(dataset.unseen)
        result |= {"unseen_accuracy": unseen.accuracy, "unseen_loss": unseen.mean_loss}
    if attack is not None:
        robust = opened.counts(dataset.test, attack)
        result |= {
            "test_robust_accuracy": robust.accuracy,
            "test_robust_loss": robust.mean_loss,
            "attack": {**dataclasses.asdict(attack), "step_size": attack.length, "norm": opened.recipe.adversary.norm},
        }
    return result


def _figures(counts: Metrics, dense: bool) -> dict[str, Any]:
    """The metrics under the names of ``evaluation.json``."""
    if dense:
        finer = {"test_iou": counts.mean_iou, "test_class_accuracy": counts.class_accuracy}
    else:
        finer = {"test_top5": counts.top5 / max(counts.samples, 1)}
    return {
        "test_accuracy": counts.accuracy,
        **finer,
        "test_loss": counts.mean_loss,
        "samples": int(counts.samples),
        "solver_steps": counts.mean_steps,
        "worst_residual": counts.worst,
        "mean_residual": counts.residual / max(counts.solves, 1),
        "converged": counts.converged_share,
    }


def _attack(
    options: AdversarySection, epsilon: float | str | None, steps: int | None, step_size: float | str | None
) -> PGD | None:
    """The recipe's attack on test images, changed by the caller's options."""
    given = {"epsilon": fraction(epsilon), "test_steps": steps, "test_step_size": fraction(step_size)}
    if given["epsilon"] == 0:
        if steps is not None or step_size is not None:
            raise UserError("--attack-steps and --attack-step-size have no effect with --attack 0, which is no attack")
        return None
    if epsilon is None and options.epsilon == 0:
        if steps is not None or step_size is not None:
            raise UserError(
                "the run was not trained with an adversary: give the radius of the attack, such as --attack 8/255"
            )
        return None
    if epsilon is not None or steps is not None:
        # A step size belongs to the radius and the number of steps that it was chosen for.
        options = options.model_copy(update={"test_step_size": None})
    wanted = {name: value for name, value in given.items() if value is not None}
    try:
        return AdversarySection.model_validate({**options.model_dump(), **wanted}).testing()
    except ValidationError as error:
        first = error.errors()[0]
        options_given = {
            "epsilon": ("--attack", epsilon),
            "test_steps": ("--attack-steps", steps),
            "test_step_size": ("--attack-step-size", step_size),
        }
        option, value = options_given[str(first["loc"][0])]
        reason = first["msg"].replace("Input should", "it should").replace("valid number", "number such as 8/255")
        raise UserError(f"{option} {value} is not right: {reason}") from None
