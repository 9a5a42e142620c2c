"""The figures of a ``python -m opteq_bench --json`` file as the Markdown tables of ``results/speed-*.md``.

PYTHONPATH=benchmarks python -m opteq_bench --device cuda --json bench.json
python benchmarks/speed_page.py bench.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    found = json.loads(parser.parse_args().file.read_text())
    machine = found["machine"]
    print(f"{machine['device']}, torch {machine['torch']}, torchdeq {machine['torchdeq']}, {found['date'][:10]}\n")
    steps(found["steps"])
    training(found["training"])
    memory(found["training"])
    models(found["models"])


def table(head: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def steps(entries: list[dict[str, Any]]) -> None:
    rows = []
    for entry in entries:
        figures = entry["figures"]
        best = figures.get("torchdeq anderson") or {}
        if not best.get("ms"):
            best = figures.get("torchdeq anderson, float32 state") or {}
        floor = figures["map"].get("floor") or {}
        row = [f"{entry['case']} {entry['precision']}", f"{figures['map']['ms']:.4g}"]
        row.append(f"{floor.get('bytes', 0) / 1e6:.0f} MB, {floor.get('operations', 0) / 1e9:.1f} G")
        row.append(_ms(figures["map"].get("floor_ms")))
        for name in ("anderson", "picard"):
            row += [f"{figures[name]['ms']:.4g}", f"{figures[name]['ratio']:.2f}", _ms(figures[name].get("floor_ms"))]
        row += [_ms(best.get("ms")), f"{best['ratio']:.1f}" if best.get("ms") else "fails"]
        rows.append(row)
    head = ["map", "ms", "least traffic, operations", "floor ms", "Anderson ms", "x map", "floor ms"]
    table([*head, "plain ms", "x map", "floor ms", "torchdeq Anderson ms", "x map"], rows)


def training(entries: list[dict[str, Any]]) -> None:
    rows = []
    for entry in entries:
        for name, figure in entry["figures"].items():
            errors = figure.get("gradient_error") or {}
            taken = f"{figure['forward_steps']:.0f} + {figure['backward_steps']:.0f}"
            row = [f"{entry['case']} {entry['precision']}", name, f"{figure['ms']:.2f}", _ms(figure.get("floor_ms"))]
            row += [taken, f"{figure['residual']:.1e}"]
            row += [f"{errors[key]:.1e}" if key in errors else "-" for key in ("x", "W.weight", "U.weight")]
            rows.append([*row, f"{entry['speedup']:.2f}" if name == "opteq" and entry.get("speedup") else ""])
    head = ["layer", "library", "ms", "floor ms", "steps", "residual", "error of x", "of W", "of U"]
    table([*head, "x torchdeq's speed"], rows)


def memory(entries: list[dict[str, Any]]) -> None:
    rows = []
    for entry in entries:
        kept = {name: figure.get("memory") for name, figure in entry["figures"].items()}
        kept |= {f"opteq, {steps} steps": used for steps, used in (entry.get("memory_by_steps") or {}).items()}
        if not any(kept.values()):
            continue
        cells = [
            f"{used['allocated'] / 1e6:.0f} / {used['reserved'] / 1e6:.0f}" if used else "-" for used in kept.values()
        ]
        rows.append([f"{entry['case']} {entry['precision']}", *cells])
        names = list(kept)
    if rows:
        table(["layer", *(f"{name}, MB of tensors / reserved" for name in names)], rows)


def models(entries: list[dict[str, Any]]) -> None:
    rows = [
        [name, f"{figure['ms']:.1f}", f"{figure['ratio']:.2f}"]
        for entry in entries
        for name, figure in entry["figures"].items()
        if figure.get("ms")
    ]
    if rows:
        table(["model", "ms a training step", "x resnet18-cifar"], rows)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
