"""Looking at equilibrium networks: gradients, guarantees, branches, explanations."""

from opteq.analysis import attention, bounds, branches
from opteq.analysis.attention import attention_map
from opteq.analysis.branches import measure_branches, reconstructed_perturbation
from opteq.analysis.gradients import GradientCost, compare_gradients

__all__ = [
    "GradientCost",
    "attention",
    "attention_map",
    "bounds",
    "branches",
    "compare_gradients",
    "measure_branches",
    "reconstructed_perturbation",
]
