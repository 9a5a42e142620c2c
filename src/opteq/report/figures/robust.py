"""Figures of what ``opteq evaluate --corruptions --curves`` measured (GEQ, Figure 2; MOptEq, Figure 3b)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import reduce
from itertools import cycle
from pathlib import Path
from typing import Any

from opteq.report.figures.style import COLORS, CaptionedFigure, panels, save
from opteq.report.figures.subject import FigureUnavailableError, Subject
from opteq.training.robustness import read_record
from opteq.training.robustness.record import describe_certified

Named = Sequence[tuple[str, dict[str, Any]]]


def corruptions(subject: Subject) -> CaptionedFigure:
    """Bars of the mean accuracy over severities, a group for each corruption."""
    records = _found(subject, "corruptions", "--corruptions", "seed", "source")
    figure, axes = panels(1, 1, (6, 1 + 0.28 * len(records[0][1]["accuracy"])))
    draw_corruptions(axes[0, 0], records)
    own = records[0][1]
    means = {name: sum(row) / len(row) for name, row in own["accuracy"].items()}
    worst, best = min(means, key=lambda name: means[name]), max(means, key=lambda name: means[name])
    return CaptionedFigure(
        figure,
        f"Accuracy under each corruption, on average over five severities, on {own['images']} test images; dots are "
        f"the severities, the dotted line is the accuracy without. {records[0][0]}: {own['clean']:.1%} without, "
        f"{own['mean']:.1%} on average; worst {worst} ({means[worst]:.1%}), best {best} ({means[best]:.1%})."
        + "".join(f" {name}: {one['clean']:.1%} without, {one['mean']:.1%} on average." for name, one in records[1:]),
    )


def attack_radius(subject: Subject) -> CaptionedFigure:
    """Accuracy against the radius of attacks."""
    records = _found(subject, "curves", "--curves", "radius.steps")
    figure, axes = panels(1, 1, (5, 3.8))
    draw_radius(axes[0, 0], records)
    own = records[0][1]["radius"]
    return CaptionedFigure(
        figure,
        f"Accuracy on {records[0][1]['images']} test images, each pixel changed by up to the radius in {own['steps']} "
        f"steps of PGD or APGD. {records[0][0]}: from {own['apgd'][0]:.1%} to {own['apgd'][-1]:.1%} under APGD at "
        f"{255 * own['radii'][-1]:.3g}/255.",
    )


def attack_steps(subject: Subject) -> CaptionedFigure:
    """Accuracy against the steps of attacks of one radius."""
    records = _found(subject, "curves", "--curves", "steps.epsilon")
    figure, axes = panels(1, 1, (5, 3.8))
    draw_steps(axes[0, 0], records)
    own = records[0][1]["steps"]
    return CaptionedFigure(
        figure,
        f"Accuracy on {records[0][1]['images']} test images under attacks of {255 * own['epsilon']:.3g}/255 by the "
        f"number of their steps. {records[0][0]}: {own['pgd'][0]:.1%} after {own['steps'][0]} and {own['pgd'][-1]:.1%} "
        f"after {own['steps'][-1]} steps of PGD. A curve that is still falling asks for more steps.",
    )


def certified(subject: Subject) -> CaptionedFigure:
    """Certified accuracy against the Euclidean radius."""
    records = [pair for pair in _found(subject, "curves", "--curves") if "accuracy" in pair[1]["certified"]]
    own = subject.record["curves"]["certified"]
    if "accuracy" not in own:
        raise FigureUnavailableError(own["reason"])
    figure, axes = panels(1, 1, (5, 3.8))
    draw_certified(axes[0, 0], records)
    return CaptionedFigure(figure, describe_certified(own))


def draw_corruptions(axes: Any, records: Named) -> None:
    """Horizontal bars, a color for each run."""
    names = list(records[0][1]["accuracy"])
    height = 0.8 / len(records)
    for place, ((title, one), color) in enumerate(zip(records, cycle(COLORS), strict=False)):
        rows = [(at, one["accuracy"][name]) for at, name in enumerate(names) if name in one["accuracy"]]
        offset = (place - (len(records) - 1) / 2) * height
        axes.barh(
            [at + offset for at, _ in rows], [100 * sum(row) / len(row) for _, row in rows], 0.92 * height,
            color=color, alpha=0.75, label=title,
        )  # fmt: skip
        for at, row in rows:
            axes.plot([100 * value for value in row], [at + offset] * len(row), ".", color="black", markersize=2.5)
        axes.axvline(100 * one["clean"], color=color, linestyle=":", linewidth=1)
    axes.set(xlabel="accuracy, %", xlim=(0, 100), yticks=range(len(names)))
    axes.set_yticklabels([name.replace("_", " ") for name in names])
    axes.invert_yaxis()
    if len(records) > 1:
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)  # bars fill the inside


def draw_radius(axes: Any, records: Named) -> None:
    """Accuracy against the radius, in steps of 1/255."""
    for (title, one), color in zip(records, cycle(COLORS), strict=False):
        curve = one["radius"]
        _pair(axes, [255 * radius for radius in curve["radii"]], curve, color, title if len(records) > 1 else "")
    axes.set(xlabel="radius, in 1/255 (largest change of a pixel)", ylabel="accuracy, %", ylim=(0, 102))
    axes.legend()


def draw_steps(axes: Any, records: Named) -> None:
    """Accuracy against the number of steps, on a logarithmic axis."""
    for (title, one), color in zip(records, cycle(COLORS), strict=False):
        curve = one["steps"]
        _pair(axes, curve["steps"], curve, color, title if len(records) > 1 else "")
    ticks = records[0][1]["steps"]["steps"]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.minorticks_off()
    epsilon = 255 * records[0][1]["steps"]["epsilon"]
    axes.set(xlabel=f"steps of the attack, radius {epsilon:.3g}/255", ylabel="accuracy, %", ylim=(0, 102))
    axes.legend()


def draw_certified(axes: Any, records: Named) -> None:
    """Certified accuracy against the radius, on a logarithmic axis that ends where nothing is certified."""
    last = max(sum(value > 0 for value in one["certified"]["accuracy"]) for _, one in records)
    for (title, one), color in zip(records, cycle(COLORS), strict=False):
        curve = one["certified"]
        pairs = list(zip(curve["radii"], curve["accuracy"], strict=True))[1 : max(last + 1, 3)]
        axes.plot(
            [r for r, _ in pairs], [100 * a for _, a in pairs], marker="o", markersize=3, color=color, label=title
        )
    axes.set_xscale("log")
    axes.set(xlabel="Euclidean radius, pixels in 0..1", ylabel="certified accuracy, %", ylim=(0, 102))
    if len(records) > 1:
        axes.legend()


def draw_record(folder: Path) -> Path | None:
    """``robustness.png`` and ``.svg`` of all that was measured of one run; None where nothing was."""
    record, title = read_record(folder), folder.resolve().name
    bars, curves = record.get("corruptions"), record.get("curves")
    drawers: list[tuple[str, Any]] = []
    if bars is not None:
        drawers.append(
            ("corruptions: mean (bars) and severities (dots)", lambda a: draw_corruptions(a, [(title, bars)]))
        )
    if curves is not None:
        drawers.append(("attacks by radius", lambda axes: draw_radius(axes, [(title, curves)])))
        drawers.append(("attacks by steps", lambda axes: draw_steps(axes, [(title, curves)])))
        drawers.append(("certified accuracy", lambda axes: _draw_certified_or_why(axes, title, curves)))
    if not drawers:
        return None
    columns = min(2, len(drawers))
    rows = -(-len(drawers) // columns)
    figure, axes = panels(rows, columns, (5.4, 5.2 if bars is not None else 3.8))
    for (heading, draw), one in zip(drawers, axes.flat, strict=False):
        draw(one)
        one.set_title(heading, fontsize="medium")
    figure.suptitle(title)
    for one in axes.flat[len(drawers) :]:
        one.set_axis_off()
    return save(figure, folder, "robustness")[0]


def _draw_certified_or_why(axes: Any, title: str, curves: dict[str, Any]) -> None:
    if "accuracy" in curves["certified"]:
        draw_certified(axes, [(title, curves)])
        return
    axes.set_axis_off()
    why = "\n".join(textwrap.wrap(describe_certified(curves["certified"]), 48))
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)


def _pair(axes: Any, across: Sequence[float], curve: dict[str, Any], color: str, title: str) -> None:
    for name, style, marker in (("apgd", "-", "o"), ("pgd", "--", "x")):
        label = f"{title} {name.upper()}".strip()
        shade = color if title or name == "apgd" else COLORS[1]  # one run has a color for each attack
        axes.plot(across, [100 * v for v in curve[name]], style, marker=marker, markersize=4, color=shade, label=label)


def _found(subject: Subject, part: str, option: str, *alike: str) -> Named:
    """The measurements of all runs, which have to agree in the settings ``alike``, such as ``steps.epsilon``."""
    runs: list[tuple[str, dict[str, Any]]] = []
    for one in (subject, *subject.beside):
        record = one.record.get(part)
        if record is None:
            raise FigureUnavailableError(
                f"it was not measured yet: run `opteq evaluate {one.opened.path} {option}` first"
            )
        runs.append((one.title, record))
    for setting in ("images", *alike):
        own, *others = (reduce(_value, setting.split("."), record) for _, record in runs)
        for (title, _), value in zip(runs[1:], others, strict=True):
            if value != own:
                raise FigureUnavailableError(
                    f"{title} was measured with {setting} {value}, this run with {own}: measure both alike"
                )
    return runs


def _value(record: Any, key: str) -> Any:
    return record.get(key, "generated" if key == "source" else None)  # older records do not say so
