"""Training: recipes, the loop, checkpoints that survive anything, and what a run tells."""

from __future__ import annotations

from opteq.common.errors import needs_extra

with needs_extra("train"):
    from opteq.training.evaluate import evaluate
    from opteq.training.guard import Interrupted, TrainingStopped
    from opteq.training.recipe.files import load_recipe, recipes
    from opteq.training.recipe.sections import Recipe
    from opteq.training.run.checkpoints import CheckpointWarning
    from opteq.training.train import train

__all__ = [
    "CheckpointWarning",
    "Interrupted",
    "Recipe",
    "TrainingStopped",
    "evaluate",
    "load_recipe",
    "recipes",
    "train",
]
