"""``robustness.json`` and ``robustness.md`` of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opteq.common.errors import UserError
from opteq.data import corruptions

FILE = "robustness.json"


def read_record(folder: Path) -> dict[str, Any]:
    """The record of earlier evaluations: ``corruptions`` and ``curves``, each if it was measured and is whole."""
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    parts = record.items() if isinstance(record, dict) else ()
    return {name: values for name, values in parts if _is_whole(name, values)}


def _is_whole(name: str, values: Any) -> bool:
    """Whether tables can be made of a part; a file that was edited, or is of another version, may be anything."""
    try:
        {"corruptions": _corruptions, "curves": _curves}[name](values)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return False
    return True


def read_reference(folder: Path, own: dict[str, Any]) -> dict[str, Any]:
    """The corruptions of a reference run, measured on the same images as ``own``."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; the reference should be a finished run")
    measured = read_record(folder).get("corruptions")
    if not isinstance(measured, dict):
        raise UserError(
            f"{folder} has no corruptions to compare with: run `opteq evaluate {folder} --corruptions` first"
        )
    check_reference(folder, measured, own)
    return measured


def check_reference(folder: Path, reference: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise unless the reference was measured on the same images and corruptions."""
    for what, usual in (("images", None), ("seed", None), ("source", "generated")):
        value, theirs = own.get(what, usual), reference.get(what, usual)
        if value != theirs:
            raise UserError(f"{folder} was measured with {what} {theirs}, this run with {value}: measure both alike")
    if own.get("labels") != reference.get("labels", own.get("labels")):  # older records have none
        raise UserError(f"{folder} was measured on images of other classes: a reference needs the same test images")
    missing = [name for name in own["accuracy"] if name not in reference.get("accuracy", {})]
    if missing:
        raise UserError(
            f"{folder} was not measured under {missing[0]}: run `opteq evaluate {folder} --corruptions` again"
        )


def keep_earlier(found: dict[str, Any], earlier: Any) -> None:
    """Add the corruptions that were measured before in the same way to ``found``, which has a few."""
    alike = {key: value for key, value in found.items() if key not in ("accuracy", "mean")}
    if not isinstance(earlier, dict) or any(earlier.get(key) != value for key, value in alike.items()):
        return
    both = {**earlier["accuracy"], **found["accuracy"]}
    found["accuracy"] = {name: both[name] for name in corruptions.NAMES if name in both}
    values = [value for row in found["accuracy"].values() for value in row]
    found["mean"] = sum(values) / len(values)


def markdown(record: dict[str, Any], title: str) -> str:
    """The record as tables."""
    parts = [f"# Robustness of {title}"]
    if "corruptions" in record:
        parts.append(_corruptions(record["corruptions"]))
    if "curves" in record:
        parts.append(_curves(record["curves"]))
    return "\n\n".join(parts) + "\n"


def _corruptions(record: dict[str, Any]) -> str:
    relative = record.get("relative")
    errors = {} if relative is None else relative["corruption_errors"]
    head = ["corruption", "1", "2", "3", "4", "5", "mean", *(["error / reference"] if relative else [])]
    rows = []
    for name, row in record["accuracy"].items():
        more = [_ratio(errors.get(name))] if relative else []
        rows.append([name, *map(_percent, row), _percent(sum(row) / len(row)), *more])
    lines = [
        f"Accuracy in % of {record['images']} test images by severity; {_percent(record['clean'])} % as they are, "
        f"{_percent(record['mean'])} % on average over all corruptions and severities ({_drawn(record)})."
    ]
    if relative is not None:
        over = "" if relative["mean_15"] is None else f" ({_ratio(relative['mean_15'])} over the 15 of ImageNet-C)"
        lines.append(
            f"Mean corruption error relative to {relative['reference']}: {_ratio(relative['mean'])}{over}; "
            f"of the errors that corruptions add: {_ratio(relative['relative_mean'])}."
        )
    return "## Corruptions\n\n" + " ".join(lines) + "\n\n" + _table(head, rows)


def _drawn(record: dict[str, Any]) -> str:
    return "published files" if record.get("source") == "published files" else f"seed {record['seed']}"


def _curves(record: dict[str, Any]) -> str:
    radius, steps, certified = record["radius"], record["steps"], record["certified"]
    radii = zip(radius["radii"], radius["pgd"], radius["apgd"], strict=True)
    counts = zip(steps["steps"], steps["pgd"], steps["apgd"], strict=True)
    first = _table(["radius", "PGD", "APGD"], [[f"{255 * r:.3g}/255", _percent(p), _percent(a)] for r, p, a in radii])
    second = _table(["steps", "PGD", "APGD"], [[str(n), _percent(p), _percent(a)] for n, p, a in counts])
    blocks = [
        f"## Attacks\n\nAccuracy in % of {record['images']} test images, every pixel changed by up to the radius in "
        f"{radius['steps']} steps.\n\n{first}",
        f"The same with a radius of {255 * steps['epsilon']:.3g}/255, by the number of steps.\n\n{second}",
        "## Certified accuracy\n\n" + describe_certified(certified),
    ]
    if "accuracy" in certified:
        pairs = zip(certified["radii"], certified["accuracy"], strict=True)
        blocks.append(_table(["Euclidean radius", "certified"], [[f"{r:g}", _percent(a)] for r, a in pairs]))
    return "\n\n".join(blocks)


def describe_certified(certified: dict[str, Any]) -> str:
    """An explanation of the certified accuracy, or of why there is none."""
    if "reason" in certified:
        return f"There is none: {certified['reason']}."
    where = {
        "weights": "from the Lipschitz constant that the weights prove, for all inputs",
        "point": f"from the certificate at each equilibrium, each with probability {certified['probability']:g}",
    }[certified["source"]]
    return (
        "The share of images, in %, that are classified rightly wherever they move within a radius (Euclidean norm, "
        f"pixels in 0..1), {where}."
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
