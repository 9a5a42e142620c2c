"""Tables for the terminal: recipes, an evaluation."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table

from opteq.training.recipe.denoising import DenoisingRecipe
from opteq.training.recipe.files import load_any_recipe, load_recipe, recipes
from opteq.training.run.progress import residual_text


def recipes_table(width: int) -> Table:
    """All recipes of the package and what each reproduces; with model, data and epochs if ``width`` allows."""
    wide = width >= _WIDE
    columns = ("recipe", "model", "data", "epochs", "reproduces") if wide else ("recipe", "reproduces")
    table = Table(*columns, title="Recipes: opteq train RECIPE", row_styles=_ROWS)
    table.columns[0].no_wrap = True
    for name in recipes():
        recipe = load_recipe(name)
        between = (recipe.model.name, recipe.data.name, str(recipe.train.epochs)) if wide else ()
        table.add_row(name, *between, recipe.reproduces)
    for name in recipes(denoising=True):
        denoiser = load_any_recipe(name)
        assert isinstance(denoiser, DenoisingRecipe)
        between = (denoiser.model.name, denoiser.data.name, f"{denoiser.train.steps} steps") if wide else ()
        table.add_row(name, *between, denoiser.reproduces)
    return table


def evaluation_table(run: str, result: dict[str, Any]) -> Table:
    """The result of :func:`~opteq.training.evaluate`."""
    # Escaped: rich would read brackets in a folder's name as markup.
    table = Table("measure", "value", title=f"{escape(run)} on {result['samples']} test images")
    table.columns[1].justify = "right"
    if "test_iou" in result:
        table.add_row("intersection over union, mean of classes", f"{result['test_iou']:.2%}")
        table.add_row("accuracy, mean of classes", f"{result['test_class_accuracy']:.2%}")
        table.add_row("accuracy of pixels", f"{result['test_accuracy']:.2%}")
    else:
        table.add_row("accuracy", f"{result['test_accuracy']:.2%}")
        if "test_top5" in result:
            table.add_row("top-5 accuracy", f"{result['test_top5']:.2%}")
    table.add_row("cross-entropy", f"{result['test_loss']:.4f}")
    if "unseen_accuracy" in result:
        table.add_row("accuracy on unseen sub-classes", f"{result['unseen_accuracy']:.2%}")
    if "attack" in result:
        steps, epsilon = result["attack"]["steps"], 255 * result["attack"]["epsilon"]
        table.add_row(f"accuracy under PGD-{steps}, {epsilon:.3g}/255", f"{result['test_robust_accuracy']:.2%}")
    if result["solver_steps"]:
        table.add_row("solver steps, mean", f"{result['solver_steps']:.1f}")
        table.add_row("relative residual, mean", f"{result['mean_residual']:.1e}")
        table.add_row("relative residual, worst of all", residual_text(result["worst_residual"]))
        table.add_row("converged", f"{result['converged']:.2%}")
        if result.get("certified") is not None:
            table.add_row("converged and certified, globally or at the point", f"{result['certified']:.2%}")
    if "feature_abs" in result:
        table.add_row(
            "features at equilibrium, mean |z| and z^2", f"{result['feature_abs']:.3g}, {result['feature_square']:.3g}"
        )
    tolerance = "the model's own" if result["tol"] is None else f"{result['tol']:g}"
    table.add_row("tolerance", tolerance)
    precision = "full" if result["precision"] == "no" else result["precision"]
    table.add_row("precision, device", f"{precision}, {result['device']}")
    return table


def unrolling_rows(rows: list[dict[str, Any]]) -> Table:
    """The result of :func:`~opteq.training.unrolling.unrolling_table`."""
    table = Table("method", "accuracy", "inference, s a batch", "backward, s a batch", "relative residual")
    for row in rows:
        times = (f"{row['inference_seconds']:.3g}", f"{row['backward_seconds']:.3g}")
        table.add_row(row["method"], f"{row['test_accuracy']:.2%}", *times, f"{row['mean_residual']:.2e}")
    return table


def denoising_table(run: str, result: dict[str, Any]) -> Table:
    """The result of :func:`opteq.training.denoising.evaluate.evaluate`."""
    names = ("images", "sigma", "noisy, dB", "PSNR, dB", "SSIM", "most steps", f"minimised to {result['tol']:g}")
    table = Table(*names, title=f"{escape(run)}: {result['parameters']:,} parameters, {result['device']}")
    for name, levels in result["sets"].items():
        for sigma, found in levels.items():
            table.add_row(
                f"{escape(name)} ({found['images']})", sigma, f"{found['noisy_psnr']:.2f}", f"{found['psnr']:.2f}",
                f"{found['ssim']:.4f}", str(found["most_steps"]), f"{found['converged']:.0%}",
            )  # fmt: skip
    return table


_ROWS = ("", "dim")
_WIDE = 150  # columns in which all that is known of a recipe fits into one line
