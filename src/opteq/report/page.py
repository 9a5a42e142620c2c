"""Read a run folder, evaluate its model, and write the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from opteq.analysis.terms import evaluation_mode
from opteq.common.files import plain_errors, write_atomically
from opteq.equilibrium import Equilibrium
from opteq.models import Classifier
from opteq.problems.certificate import Certificate
from opteq.report import sections
from opteq.report.cards import appendix, cards
from opteq.report.charts.robustness import robustness
from opteq.report.denoising import write_denoising_report
from opteq.report.examples import Example, explain
from opteq.report.formula import formulas
from opteq.report.frame import html_page
from opteq.report.guarantees import guarantees
from opteq.report.html.markup import Html, join, tag
from opteq.report.html.numbers import count, decimal, duration, percent, plural, scientific, short_count
from opteq.report.predictions import LabelledImages, Predictions, SolveRecord, predict
from opteq.report.run import Run, read_run
from opteq.report.segmentation import SegmentationResult, evaluate_segmentation, pixel_mistakes, segmentation_cards


@dataclass
class Findings:
    """Results of the saved model. Each may be missing; the run's notes then say why."""

    model: Classifier | None = None
    images: LabelledImages | None = None
    predictions: Predictions | None = None
    examples: list[Example] | None = None
    maps: SegmentationResult | None = None

    @property
    def solves(self) -> list[SolveRecord]:
        """Statistics of the solves; empty where nothing was evaluated."""
        evaluated = self.predictions if self.predictions is not None else self.maps
        return [] if evaluated is None else evaluated.solves

    def layers(self) -> list[tuple[str, Equilibrium]]:
        """The equilibrium layers of the model."""
        if self.model is None:
            return []
        return [(name, layer) for name, layer in self.model.named_modules() if isinstance(layer, Equilibrium)]


def write(run_dir: str | Path, seconds: float = 120.0) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    One self-contained HTML file: learning curves, the objective, convergence, certificates, confusions and example
    images. For an unfinished run, or a folder with missing files, the report says so. The file is written atomically.

    Args:
        run_dir: the folder that ``opteq train`` wrote.
        seconds: time limit for the evaluation of test images; the report says how many were evaluated.

    Raises:
        UserError: ``run_dir`` is not a run folder, or can't be written to.
    """
    folder = Path(run_dir)
    run = read_run(folder)
    if run.recipe.get("task") == "denoising":
        return write_denoising_report(folder)
    findings = _findings(run, seconds)
    html = render(run, findings)
    target = folder / "report.html"
    with plain_errors("writing the report"):
        # File names in the command may not be valid Unicode.
        write_atomically(target, html.encode(errors="replace"))
    return target


def render(run: Run, findings: Findings) -> str:
    """The report as HTML."""
    layers = findings.layers()
    parts: list[Html] = []
    if findings.model is not None:
        parts.append(sections.objective([(name, one) for name, layer in layers for one in formulas(layer.problem)]))
    parts.append(sections.learning(run))
    if findings.solves:
        parts.append(sections.solving(findings.solves))
    if layers:
        parts.append(guarantees([(name, _certificate(layer)) for name, layer in layers], run.certified))
    if run.robustness:
        parts.append(robustness(run.robustness, run.folder))
    if findings.predictions is not None and findings.images is not None and len(findings.predictions.order):
        parts.append(sections.mistakes(findings.predictions, findings.images.classes))
    if findings.examples and findings.images is not None:
        parts.append(cards(findings.examples, findings.images.classes))
    if findings.maps is not None and findings.images is not None:
        parts += [
            pixel_mistakes(findings.maps, findings.images.classes),
            segmentation_cards(findings.maps.examples, findings.images.classes),
        ]
    parts.append(appendix(run))
    notes = tag("ul", *(tag("li", note) for note in run.notes), class_="notes") if run.notes else None
    return html_page(
        run.name,
        "report of a run",
        _subtitle(run, findings),
        sections.headline(_numbers(run, findings)),
        notes,
        join(*parts),
    )


def _subtitle(run: Run, findings: Findings) -> Html:
    """Model, data, training time, and the result that it reproduces."""
    model = run.section("model").get("name") or run.config.get("name") or "a model"
    data = run.section("data").get("name")
    on = None if data is None else f"on {data}"
    classes = None if findings.images is None else f"with {len(findings.images.classes)} classes"
    seconds = sum(value for value in run.column("seconds") if math.isfinite(value))
    trained = f"trained for {duration(seconds)}" if seconds > 0 else None
    what = join(tag("b", model), on, classes, between=" ")
    goal = run.recipe.get("reproduces")
    return join(what, trained, f"the recipe's goal: {goal}" if goal else None, between=" · ")


def _numbers(run: Run, findings: Findings) -> list[tuple[str, str, str]]:
    """The headline: values measured now, or those that training recorded."""
    predictions, maps = findings.predictions, findings.maps
    measure, key = ("mean IoU", "test_iou") if run.latest("test_iou") is not None else ("accuracy", "test_accuracy")
    accuracy, about = run.latest(key), "on the test images, as recorded"
    if predictions is not None and predictions.complete and len(predictions.order):
        accuracy, about = predictions.accuracy, f"of {plural(predictions.total, 'test image')}"
    elif maps is not None and maps.seen == maps.total:
        measure, accuracy, about = "mean IoU", maps.mean_overlap, f"over {plural(maps.total, 'test image')}"
    elif accuracy is None:
        about = "not measured yet"
    epochs, planned = len(run.epochs), run.planned_epochs
    of = "recorded" if planned is None else "as planned" if planned == epochs else f"of {planned} planned"
    numbers = [(measure, percent(accuracy), about), ("epochs", count(epochs), of)]
    if findings.model is not None:
        size = sum(parameter.numel() for parameter in findings.model.parameters())
        numbers.insert(1, ("parameters", short_count(size), f"exactly {size:,}"))
        if not findings.layers():
            return numbers
    solves = findings.solves
    steps, worst = run.latest("solver_steps"), run.latest("worst_residual")
    if solves:
        steps = sum(one.mean_steps for one in solves) / len(solves)
        worst = max(one.worst_residual for one in solves)
    if steps is not None:
        numbers.append(("solver steps", decimal(steps), "per image, on average"))
    if worst is not None:
        tolerance = "as recorded"
        if solves:
            tol = max(one.tol for one in solves)
            where = "within the tolerance" if worst <= tol else "above the tolerance"
            tolerance = f"{where} of {scientific(tol, 0)}"
        numbers.append(("worst residual", scientific(worst), tolerance))
    return numbers


def _findings(run: Run, seconds: float) -> Findings:
    """Load the model and evaluate it; failures become notes."""
    findings = Findings()
    if not run.has_weights:
        run.notes.append("No weights are saved yet, so the report shows only what training recorded.")
        return findings
    from opteq import data, models  # imported here: not needed without weights

    try:
        findings.model = models.from_pretrained(run.folder)
    except (ValueError, RuntimeError, OSError) as error:
        run.notes.append(f"The weights can't be loaded: {error}")
        return findings
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    findings.model.to(device).eval()
    known = ("name", "root", "cache", "image_size", "stream", "workers")
    options = {key: value for key, value in run.section("data").items() if key in known}
    if "name" not in options:
        run.notes.append("The recipe names no data, so no test images are shown.")
        return findings
    try:
        loaded = data.load(**options)
    except (ValueError, TypeError, OSError) as error:
        run.notes.append(f"The test images can't be loaded: {error}")
        return findings
    trained = {"classes": loaded.classes, "mean": loaded.mean, "std": loaded.std, **findings.model.config["extra"]}
    if list(trained["classes"]) != list(loaded.classes):
        run.notes.append("The classes are not those that the model was trained on, so no test images are shown.")
        return findings
    split = loaded.test
    # Mean and std are those of training.
    colours = tuple(trained["mean"]), tuple(trained["std"])
    findings.images = LabelledImages(split.images, split.labels, tuple(loaded.classes), *colours)
    try:
        with evaluation_mode(findings.model):
            if not all(bool(torch.isfinite(weight).all()) for weight in findings.model.parameters()):
                raise ValueError("its weights are not finite")
            if split.dense:
                findings.maps = evaluate_segmentation(findings.model, findings.images, seconds)
                return findings
            findings.predictions = predict(findings.model, findings.images, seconds)
            findings.examples = explain(findings.model, findings.images, findings.predictions, seconds)
    except (ValueError, RuntimeError) as error:  # weights that are not finite, or images of another size
        run.notes.append(f"The model can't be run on the test images: {error}")
    return findings


def _certificate(layer: Equilibrium) -> Certificate | str:
    try:
        certificate: Certificate = layer.problem.certificate()
        return certificate
    except (ValueError, RuntimeError) as error:  # weights that are not finite have no norms
        return str(error)
