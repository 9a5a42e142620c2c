"""Training runs as a page: a table with every one of them, and learning curves.

Takes what is worth keeping from run folders, the recipe as it was resolved and the metrics of every epoch, into a
folder; and writes tables and curves of all runs that lie there.

    python benchmarks/runs_page.py results/cifar10-jpeg --add runs/cifar10-jpeg-resnet18 runs/cifar10-jpeg-geq-5m
    python benchmarks/runs_page.py results/cifar10-jpeg            # the tables again, on the standard output

``notes.toml`` in the folder says in a few words what was tried in each run, and in which group it is shown:

    [cifar10-jpeg-geq-5m]
    group = "30 epochs"
    note = "as in the recipe"
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import tomlkit

from opteq import models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--add", type=Path, nargs="*", default=[], metavar="RUN", help="run folders to take in")
    options = parser.parse_args()
    for run in options.add:
        keep(run, options.folder)
    notes = tomlkit.parse((options.folder / "notes.toml").read_text(encoding="utf-8")).unwrap()
    runs = {path.stem: Run(path) for path in sorted(options.folder.glob("*.jsonl"))}
    missing = sorted(set(runs) ^ set(notes))
    if missing:
        raise SystemExit(f"runs and notes.toml do not have the same names: {', '.join(missing)}")
    for group in dict.fromkeys(note["group"] for note in notes.values()):
        members = {name: runs[name] for name, note in notes.items() if note["group"] == group}
        print(f"## {group}\n")
        table(members, notes, options.folder.name)
        picture = options.folder / f"{re.sub(r'[^a-z0-9]+', '-', group.lower()).strip('-')}.svg"
        curves(members, picture)
        print(f"![Learning curves, {group}]({options.folder.name}/{picture.name})\n")


def recipe_without_places(run: Path) -> str:
    """The recipe of a run, without the folders where its pictures lay."""
    return re.sub(r"^(root|cache) = .*\n", "", (run / "recipe.toml").read_text(encoding="utf-8"), flags=re.MULTILINE)


def keep(run: Path, folder: Path) -> None:
    """Copy recipe, metrics and, where there is one, the evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{run.name}.toml").write_text(recipe_without_places(run), encoding="utf-8")
    shutil.copyfile(run / "metrics.jsonl", folder / f"{run.name}.jsonl")
    if (run / "evaluation.json").exists():
        shutil.copyfile(run / "evaluation.json", folder / f"{run.name}.evaluation.json")


class Run:
    """A run as it was kept."""

    def __init__(self, metrics: Path) -> None:
        self.recipe: dict[str, Any] = tomlkit.parse(metrics.with_suffix(".toml").read_text(encoding="utf-8")).unwrap()
        self.epochs = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        evaluation = metrics.with_suffix(".evaluation.json")
        self.evaluation: dict[str, Any] | None = json.loads(evaluation.read_text()) if evaluation.exists() else None

    @property
    def parameters(self) -> int:
        """How many the network has."""
        model = models.create(self.recipe["model"]["name"], **self.recipe["model"].get("options", {}))
        return sum(parameter.numel() for parameter in model.parameters())

    @property
    def seconds(self) -> float:
        """Of an epoch with its test, the median: the first one captures graphs."""
        times = sorted(epoch["seconds"] for epoch in self.epochs)
        return float(times[len(times) // 2])


def table(runs: dict[str, Run], notes: dict[str, dict[str, str]], folder: str) -> None:
    print(
        "| run | what | parameters | seed | epochs | test accuracy | solved to 1e-4 | s an epoch | steps | residual |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    for name, run in runs.items():
        last, asked = run.epochs[-1], run.recipe["train"]["epochs"]
        epochs = str(asked) if len(run.epochs) == asked else f"{len(run.epochs)} of {asked}"
        solved = "" if run.evaluation is None else f"{100 * run.evaluation['test_accuracy']:.2f} %"
        steps = last.get("test_solver_steps", last.get("solver_steps", 0.0))
        residual = last.get("test_worst_residual", last.get("worst_residual", 0.0))
        explicit = not steps
        print(
            f"| [{name}]({folder}/{name}.toml) | {notes[name]['note']} | {run.parameters:,} "
            f"| {run.recipe['train'].get('seed', 0)} | {epochs} | {100 * last['test_accuracy']:.2f} % | {solved} "
            f"| {run.seconds:.1f} | {'-' if explicit else f'{steps:.1f}'} | {'-' if explicit else f'{residual:.1e}'} |"
        )
    print()


def curves(runs: dict[str, Run], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = path.name  # the same picture for the same numbers
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for index, (name, run) in enumerate(runs.items()):
        style = {"label": name, "linestyle": ("-", "--", ":")[index // 10 % 3], "linewidth": 1.4}
        numbers = [epoch["epoch"] for epoch in run.epochs]
        left.plot(numbers, [100 * epoch["test_accuracy"] for epoch in run.epochs], **style)
        right.plot(numbers, [epoch["train_loss"] for epoch in run.epochs], **style)
    left.set(xlabel="epoch", ylabel="test accuracy, %")
    right.set(xlabel="epoch", ylabel="training loss", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
