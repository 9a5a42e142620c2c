"""Training by recipes: the loop, checkpoints, metrics and evaluation."""

from __future__ import annotations

from opteq.common.errors import needs_extra

with needs_extra("train"):
    from opteq.training.denoising.evaluate import evaluate as evaluate_denoiser
    from opteq.training.denoising.evaluate import is_denoiser
    from opteq.training.denoising.trainer import train as train_denoiser
    from opteq.training.evaluate import evaluate
    from opteq.training.guard import Interrupted, TrainingStopped
    from opteq.training.optim.jacobian import RadiusLimit
    from opteq.training.recipe.files import AnyRecipe, load_any_recipe, load_recipe, recipes
    from opteq.training.recipe.sections import Recipe
    from opteq.training.robustness import evaluate_robustness
    from opteq.training.run.checkpoints import CheckpointWarning
    from opteq.training.train import train

__all__ = [
    "AnyRecipe",
    "CheckpointWarning",
    "Interrupted",
    "RadiusLimit",
    "Recipe",
    "TrainingStopped",
    "evaluate",
    "evaluate_denoiser",
    "evaluate_robustness",
    "is_denoiser",
    "load_any_recipe",
    "load_recipe",
    "recipes",
    "train",
    "train_denoiser",
]
