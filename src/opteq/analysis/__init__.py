"""Analysis of equilibrium networks: gradients, bounds, certificates at the point, branches, attacks and maps."""

from opteq.analysis import attack, attention, bounds, branches, saliency, terms
from opteq.analysis.attack import PGD
from opteq.analysis.attention import attention_map
from opteq.analysis.branches import measure_branches, reconstructed_perturbation
from opteq.analysis.gradients import GradientCost, compare_gradients
from opteq.analysis.local import LocalCertificate, local_certificate
from opteq.analysis.saliency import saliency_map
from opteq.analysis.terms import LayerTerms, objective_terms

__all__ = [
    "PGD",
    "GradientCost",
    "LayerTerms",
    "LocalCertificate",
    "attack",
    "attention",
    "attention_map",
    "bounds",
    "branches",
    "compare_gradients",
    "local_certificate",
    "measure_branches",
    "objective_terms",
    "reconstructed_perturbation",
    "saliency",
    "saliency_map",
    "terms",
]
