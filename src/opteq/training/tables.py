"""Tables for people: recipes, models, an evaluation."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from opteq import models
from opteq.training.recipe_files import load_recipe, recipes


def recipes_table(width: int) -> Table:
    """All recipes of the package and what each reproduces; where ``width`` allows, model, data and epochs too."""
    wide = width >= _WIDE
    columns = ("recipe", "model", "data", "epochs", "reproduces") if wide else ("recipe", "reproduces")
    table = Table(*columns, title="Recipes: opteq train RECIPE", row_styles=_ROWS)
    table.columns[0].no_wrap = True
    for name in recipes():
        recipe = load_recipe(name)
        between = (recipe.model.name, recipe.data.name, str(recipe.train.epochs)) if wide else ()
        table.add_row(name, *between, recipe.reproduces)
    return table


def models_table() -> Table:
    """All models, with the number of parameters for ten classes of colour pictures."""
    table = Table("model", "parameters", "what it is, and what it reproduces", title="Models", row_styles=_ROWS)
    table.columns[0].no_wrap = True
    table.columns[1].justify = "right"
    for name in models.list():
        card = models.describe(name)
        table.add_row(name, f"{card.parameters:,}", "; ".join(filter(None, (card.summary, card.reproduces))))
    return table


def evaluation_table(run: str, result: dict[str, Any]) -> Table:
    """What :func:`~opteq.training.evaluate` found."""
    table = Table("measure", "value", title=f"{run} on {result['samples']} test pictures")
    table.columns[1].justify = "right"
    table.add_row("accuracy", f"{result['test_accuracy']:.2%}")
    table.add_row("top-5 accuracy", f"{result['test_top5']:.2%}")
    table.add_row("cross-entropy", f"{result['test_loss']:.4f}")
    if result["solver_steps"]:
        table.add_row("solver steps, mean", f"{result['solver_steps']:.1f}")
        table.add_row("relative residual, mean", f"{result['mean_residual']:.1e}")
        table.add_row("relative residual, worst of all", f"{result['worst_residual']:.1e}")
        table.add_row("converged", f"{result['converged']:.2%}")
    tolerance = "the model's own" if result["tol"] is None else f"{result['tol']:g}"
    table.add_row("tolerance", tolerance)
    precision = "full" if result["precision"] == "no" else result["precision"]
    table.add_row("precision, device", f"{precision}, {result['device']}")
    return table


_ROWS = ("", "dim")
_WIDE = 150  # columns in which all that is known of a recipe fits into one line
