"""The figures as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

_WORDS = {"case", "step", "solver", "library", "model", ""}


def steps_table(entries: Sequence[dict[str, Any]]) -> Table:
    """What a solver step costs beside the map."""
    table = _table("A step of the map and of solvers", "case", "step", "ms", "x map", "floor ms", "")
    for entry in entries:
        for name, figure in entry["figures"].items():
            if figure["fails"] is not None:
                table.add_row(_case(entry), name, "-", "-", "-", figure["fails"])
            else:
                table.add_row(_case(entry), name, _ms(figure["ms"]), _times(figure["ratio"]), _floor(figure), "")
        table.add_section()
    return table


def answers_table(entries: Sequence[dict[str, Any]]) -> Table:
    """Whether all ways lead to the same equilibrium."""
    table = _table("Relative residual of answers, worst sample", "case", "solver", "residual", "asked for", "")
    for entry in entries:
        answers = entry["answers"]
        for name, found in answers["found"].items():
            verdict = found["fails"] or ("pass" if found["within"] else "FAIL")
            table.add_row(_case(entry), name, _small(found["residual"]), _small(answers["tol"]), verdict)
        table.add_section()
    return table


def training_table(entries: Sequence[dict[str, Any]]) -> Table:
    """Training steps of one layer, ours and torchdeq's."""
    title = "Forward and backward of a layer to the same tolerance"
    table = _table(title, "case", "library", "ms", "floor ms", "steps", "residual", "")
    for entry in entries:
        for name, figure in entry["figures"].items():
            if figure["fails"] is not None:
                table.add_row(_case(entry), name, *["-"] * 4, figure["fails"])
                continue
            steps = f"{figure['forward_steps']:.0f} + {figure['backward_steps']:.0f}"
            note = _verdict(entry) if name == "opteq" else f"backward by {entry['torchdeq_backward']}"
            numbers = _ms(figure["ms"]), _floor(figure), steps, _small(figure["residual"])
            table.add_row(_case(entry), name, *numbers, note)
        if entry["shared_ms"] is not None:
            note = "bound of W and input term, in both"
            table.add_row(_case(entry), "shared", _ms(entry["shared_ms"]), "-", "-", "-", note)
        table.add_section()
    return table


def gradients_table(entries: Sequence[dict[str, Any]]) -> Table:
    """Errors of gradients, and memory."""
    title = "Gradients against a float64 reference, and peak memory of a training step"
    table = _table(title, "case", "library", "error of x", "of W", "of U", "MB of tensors", "MB reserved")
    for entry in entries:
        for name, figure in entry["figures"].items():
            if figure["fails"] is None:
                errors = figure["gradient_error"]
                shown = [_small(errors[key]) for key in ("x", "W.weight", "U.weight")]
                table.add_row(_case(entry), name, *shown, *_megabytes(figure["memory"]))
        for steps, memory in (entry["memory_by_steps"] or {}).items():
            table.add_row(_case(entry), f"opteq, {steps} + {steps} steps", "-", "-", "-", *_megabytes(memory))
        table.add_section()
    return table


def epoch_table(entry: dict[str, Any]) -> Table:
    """Training steps of whole models."""
    title = f"A training step of models, {entry['precision']}, batch {entry['batch']}"
    table = _table(title, "model", "ms", f"x {entry['baseline']}", "solver steps", "")
    for name, figure in entry["figures"].items():
        if figure["fails"] is not None:
            table.add_row(name, "-", "-", "-", figure["fails"])
            continue
        steps = " + ".join(f"{solve['steps']:.0f}" for solve in figure["solves"].values()) or "-"
        table.add_row(name, _ms(figure["ms"]), _times(figure["ratio"]), steps, "")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right", overflow="fold")
    return table


def _case(entry: dict[str, Any]) -> str:
    return f"{entry['case']} {entry['precision']}"


def _verdict(entry: dict[str, Any]) -> str:
    speed = "" if entry["speedup"] is None else f", {entry['speedup']:.2f} x torchdeq's speed"
    return ("pass" if entry["agree"] else "FAIL") + speed


def _floor(figure: dict[str, Any]) -> str:
    if "floor" not in figure:
        return "-"
    return "unknown" if figure["floor_ms"] is None else _ms(figure["floor_ms"])


def _ms(value: float) -> str:
    return f"{value:.4f}" if value < 1 else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _megabytes(memory: dict[str, int] | None) -> tuple[str, str]:
    if memory is None:
        return "-", "-"
    return f"{memory['allocated'] / 1e6:.0f}", f"{memory['reserved'] / 1e6:.0f}"
