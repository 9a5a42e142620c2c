"""Runs side by side as a table: accuracy, time, memory, steps, corruptions and attacks, from what runs record.

    opteq train cifar10-jpeg-mdeq-2.5m --set data.root=DIR --out runs/mdeq-2.5m          # and so on, a run for each
    opteq evaluate runs/mdeq-2.5m --corruptions --curves --images 1000 --reference runs/resnet18
    python benchmarks/comparators.py runs/resnet18 runs/mdeq-2.5m ...

A column is empty where it was not measured. Seconds are the median of an epoch's training, without its test.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from safetensors import safe_open

from opteq.training.robustness import read_record

COLUMNS = (
    "run", "parameters", "epochs", "test accuracy", "unseen classes", "s per epoch", "MiB", "steps", "worst residual",
    "corruptions, mean", "error / reference", "PGD", "APGD",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    rows = [row(run) for run in parser.parse_args().runs]
    print(f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}")
    for one in rows:
        print(f"| {' | '.join(one)} |")


def row(run: Path) -> list[str]:
    """One run, in the order of the columns."""
    epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last, record = epochs[-1], read_record(run)
    solved = bool(last["test_solver_steps"])
    corrupted, curves = record.get("corruptions", {}), record.get("curves")
    return [
        run.resolve().name,
        f"{parameters(run):,}",
        str(len(epochs)),
        percent(last["test_accuracy"]),
        percent(last.get("unseen_accuracy")),
        f"{statistics.median(epoch['seconds'] for epoch in epochs):.1f}",
        "" if last["peak_memory_mb"] is None else f"{max(epoch['peak_memory_mb'] for epoch in epochs):,.0f}",
        f"{last['test_solver_steps']:.1f}" if solved else "-",
        "-" if not solved else "infinite" if (worst := last["test_worst_residual"]) is None else f"{worst:.1e}",
        percent(corrupted.get("mean")),
        "" if "relative" not in corrupted else f"{corrupted['relative']['mean']:.3f}",
        *(["", ""] if curves is None else [attacked(curves, name) for name in ("pgd", "apgd")]),
    ]


def parameters(run: Path) -> int:
    """How many numbers are trained: the weights without the statistics of normalisations."""
    with safe_open(run / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if not name.endswith(("running_mean", "running_var", "batches_tracked"))]  # noqa: SIM118
        return sum(file.get_tensor(name).numel() for name in names)


def attacked(curves: dict[str, Any], name: str) -> str:
    """Accuracy at the radius that was asked for, after all steps."""
    steps = curves["steps"]
    return f"{percent(steps[name][-1])} ({255 * steps['epsilon']:.3g}/255, {steps['steps'][-1]} steps)"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} %"


if __name__ == "__main__":
    main()
