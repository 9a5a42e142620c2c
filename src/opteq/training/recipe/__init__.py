"""Recipes: what they say, their files, and overrides from the command line."""

from opteq.training.recipe.files import load_recipe, recipes
from opteq.training.recipe.sections import Recipe

__all__ = ["Recipe", "load_recipe", "recipes"]
