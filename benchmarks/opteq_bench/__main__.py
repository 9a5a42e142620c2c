"""The command line: ``PYTHONPATH=benchmarks python -m opteq_bench --device cpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opteq.cli import one_line_errors
from opteq_bench import run


def main(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    batch: Annotated[int | None, typer.Option(help="Batch size; 128 on a GPU, 8 on a CPU by default.")] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(metavar="CHANNELS,HIDDEN,SIDE", help="A layer, such as 32,64,32; several may be given."),
    ] = None,
    precision: Annotated[list[str] | None, typer.Option(help="float32, tf32 or bf16; several may be given.")] = None,
    models: Annotated[bool, typer.Option("--models/--no-models", help="Whole models too.")] = True,
    repeats: Annotated[int, typer.Option(help="Repetitions that the median is taken over.")] = 10,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file.")] = None,
) -> None:
    """Time solvers and training steps beside the bare map, torchdeq and the floor; status 1 if answers disagree."""
    with one_line_errors():
        passed = run(device, batch, shapes or (), precision or (), models, repeats, json)
    if not passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
