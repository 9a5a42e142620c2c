"""Gather what a run folder holds, make the page of it, and put it there in one piece."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from string import Template

import torch
from torch import nn

from opteq.analysis.terms import evaluating
from opteq.common.files import plain_errors, write_atomically
from opteq.equilibrium import Equilibrium
from opteq.problems.certificate import Certificate
from opteq.report import sections
from opteq.report.cards import appendix, cards
from opteq.report.examine import Examination, Pictures, SolveRecord, examine
from opteq.report.examples import Example, explain
from opteq.report.formula import formulas
from opteq.report.guarantees import guarantees
from opteq.report.html.markup import Html, join, tag
from opteq.report.html.numbers import count, decimal, duration, percent, plural, scientific, short_count
from opteq.report.run import Run, read_run
from opteq.report.segmentation import MapExamination, examine_maps, map_cards, pixel_mistakes


@dataclass
class Findings:
    """What the saved model showed. Every piece may be missing; the run's notes then say why."""

    model: nn.Module | None = None
    pictures: Pictures | None = None
    examination: Examination | None = None
    examples: list[Example] | None = None
    maps: MapExamination | None = None

    @property
    def solves(self) -> list[SolveRecord]:
        """How the solves went; empty where nothing was looked at."""
        looked = self.examination if self.examination is not None else self.maps
        return [] if looked is None else looked.solves

    def layers(self) -> list[tuple[str, Equilibrium]]:
        """The equilibrium layers; none without a model."""
        if self.model is None:
            return []
        return [(name, layer) for name, layer in self.model.named_modules() if isinstance(layer, Equilibrium)]


def write(run_dir: str | Path, seconds: float = 120.0) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    The page is one file that needs nothing else: learning curves, what the network minimises, how its solves go, what
    is guaranteed, where it errs, and some test pictures explained. A run that is not finished, or a folder with pieces
    missing, gives a page that says so. The file appears whole or not at all.

    Args:
        run_dir: the folder that ``opteq train`` wrote.
        seconds: time after which no further test pictures are looked at. The page says how many were; large models on
            a CPU would otherwise take longer over their report than a reader waits.

    Raises:
        UserError: ``run_dir`` is not a run folder, or can't be written to.
    """
    folder = Path(run_dir)
    run = read_run(folder)
    found = _findings(run, seconds)
    html = render(run, found)
    target = folder / "report.html"
    with plain_errors("writing the report", "free some space or mend the permissions"):
        # Names of files, as in the command, are bytes and need not be text.
        write_atomically(target, html.encode(errors="replace"))
    return target


def render(run: Run, found: Findings) -> str:
    """The whole page as text."""
    layers = found.layers()
    parts: list[Html] = []
    if found.model is not None:
        parts.append(sections.objective([(name, one) for name, layer in layers for one in formulas(layer.problem)]))
    parts.append(sections.learning(run))
    if found.solves:
        parts.append(sections.solving(found.solves))
    if layers:
        parts.append(guarantees([(name, _certificate(layer)) for name, layer in layers]))
    if found.examination is not None and found.pictures is not None and len(found.examination.order):
        parts.append(sections.mistakes(found.examination, found.pictures.classes))
    if found.examples and found.pictures is not None:
        parts.append(cards(found.examples, found.pictures.classes))
    if found.maps is not None and found.pictures is not None:
        parts += [
            pixel_mistakes(found.maps, found.pictures.classes),
            map_cards(found.maps.examples, found.pictures.classes),
        ]
    parts.append(appendix(run))
    notes = tag("ul", *(tag("li", note) for note in run.notes), class_="notes") if run.notes else None
    here = resources.files("opteq.report") / "web"
    page = Template(here.joinpath("page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=join(run.name),
        # The figures come first: the page's own sheet ends with what changes on phones, which has the last word.
        style="\n".join(here.joinpath(name).read_text(encoding="utf-8") for name in ("figures.css", "style.css")),
        script=here.joinpath("page.js").read_text(encoding="utf-8"),
        subtitle=_subtitle(run, found),
        headline=sections.headline(_numbers(run, found)),
        notes=notes or "",
        body=join(*parts),
        colophon=join(
            f"Written by opteq on {datetime.now().astimezone():%Y-%m-%d at %H:%M}. This page needs no network."
        ),
    )


def _subtitle(run: Run, found: Findings) -> Html:
    """Which model, on what, for how long, and what it is to reproduce."""
    model = run.section("model").get("name") or run.config.get("name") or "a model"
    data = run.section("data").get("name")
    on = None if data is None else f"on {data}"
    classes = None if found.pictures is None else f"with {len(found.pictures.classes)} classes"
    seconds = sum(value for value in run.column("seconds") if math.isfinite(value))
    trained = f"trained for {duration(seconds)}" if seconds > 0 else None
    what = join(tag("b", model), on, classes, between=" ")
    return join(what, trained, run.recipe.get("reproduces") or None, between=" · ")


def _numbers(run: Run, found: Findings) -> list[tuple[str, str, str]]:
    """The headline: what was measured now where it was, what training recorded elsewhere."""
    looked, maps = found.examination, found.maps
    measure, key = ("mean IoU", "test_iou") if run.latest("test_iou") is not None else ("accuracy", "test_accuracy")
    accuracy, about = run.latest(key), "on the test pictures, as recorded"
    if looked is not None and looked.complete and len(looked.order):
        accuracy, about = looked.accuracy, f"of {plural(looked.total, 'test picture')}"
    elif maps is not None and maps.seen == maps.total:
        measure, accuracy, about = "mean IoU", maps.mean_overlap, f"over {plural(maps.total, 'test picture')}"
    elif accuracy is None:
        about = "not measured yet"
    epochs, planned = len(run.epochs), run.planned_epochs
    of = "recorded" if planned is None else "as planned" if planned == epochs else f"of {planned} planned"
    numbers = [(measure, percent(accuracy), about), ("epochs", count(epochs), of)]
    if found.model is not None:
        size = sum(parameter.numel() for parameter in found.model.parameters())
        numbers.insert(1, ("parameters", short_count(size), f"exactly {size:,}"))
        if not found.layers():
            return numbers
    solves = found.solves
    steps, worst = run.latest("solver_steps"), run.latest("worst_residual")
    if solves:
        steps = sum(one.mean_steps for one in solves) / len(solves)
        worst = max(one.worst_residual for one in solves)
    if steps is not None:
        numbers.append(("solver steps", decimal(steps), "a picture, on average"))
    if worst is not None:
        tolerance = f"tolerance {scientific(solves[0].tol, 0)}" if solves else "as recorded"
        numbers.append(("worst residual", scientific(worst), tolerance))
    return numbers


def _findings(run: Run, seconds: float) -> Findings:
    """Load and examine what can be; what can't becomes a note."""
    found = Findings()
    if not run.has_weights:
        run.notes.append("No weights are saved yet, so the page shows what training recorded and no more.")
        return found
    from opteq import data, models  # imported late: a page without weights needs neither

    try:
        found.model = models.from_pretrained(run.folder)
    except (ValueError, RuntimeError, OSError) as error:
        run.notes.append(f"The weights can't be loaded: {error}")
        return found
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found.model.to(device).eval()
    asked = {key: value for key, value in run.section("data").items() if key in ("name", "root", "cache", "image_size")}
    if "name" not in asked:
        run.notes.append("The recipe names no data, so no test pictures are shown.")
        return found
    try:
        loaded = data.load(**asked)
    except (ValueError, TypeError, OSError) as error:
        run.notes.append(f"The test pictures can't be loaded: {error}")
        return found
    trained = {"classes": loaded.classes, "mean": loaded.mean, "std": loaded.std, **found.model.config["extra"]}
    if list(trained["classes"]) != list(loaded.classes):
        run.notes.append("The classes are not those that the model was trained on, so no test pictures are shown.")
        return found
    split = loaded.test
    # Colours are normalised as they were in training, whatever the training pictures are now.
    colours = tuple(trained["mean"]), tuple(trained["std"])
    found.pictures = Pictures(split.images, split.labels, tuple(loaded.classes), *colours)
    try:
        with evaluating(found.model):
            if split.dense:
                found.maps = examine_maps(found.model, found.pictures, seconds)
                return found
            found.examination = examine(found.model, found.pictures, seconds)
            found.examples = explain(found.model, found.pictures, found.examination)
    except (ValueError, RuntimeError) as error:  # weights that are not finite, or pictures of another size
        run.notes.append(f"The model can't be run on the test pictures: {error}")
    return found


def _certificate(layer: Equilibrium) -> Certificate | str:
    try:
        certificate: Certificate = layer.problem.certificate()
        return certificate
    except (ValueError, RuntimeError) as error:  # weights that are not finite have no norms
        return str(error)
