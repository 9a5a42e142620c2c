"""Looking at equilibrium networks: gradients, guarantees, explanations."""

from opteq.analysis.gradients import GradientCost, compare_gradients

__all__ = ["GradientCost", "compare_gradients"]
