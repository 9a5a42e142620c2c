"""The command line."""

from __future__ import annotations

from typing import Annotated

import typer

import opteq

app = typer.Typer(
    help="Networks whose output solves an optimisation problem that a person can read and edit.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Options that come before a command."""
    if version:
        typer.echo(f"opteq {opteq.__version__}")
        raise typer.Exit


@app.command()
def demo(
    samples: Annotated[int, typer.Option(min=4, max=1797, help="How many digits to solve for.")] = 256,
) -> None:
    """Solve one equilibrium network on the embedded digits and explain what it did."""
    from opteq.demo import run

    run(samples)
