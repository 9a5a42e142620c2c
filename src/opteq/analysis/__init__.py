"""Analysis of equilibrium networks: gradients, bounds, certificates at the point, branches, attacks and maps."""

from opteq.analysis import attack, attention, bounds, branches, saliency, terms
from opteq.analysis.apgd import APGD
from opteq.analysis.attack import PGD
from opteq.analysis.attention import attention_map
from opteq.analysis.branches import measure_branches, reconstructed_perturbation
from opteq.analysis.certified_radius import CertifiedClassifier, CertifiedRadius, lipschitz_bound
from opteq.analysis.evidence import Evidence, class_evidence
from opteq.analysis.grad_cam import grad_cam
from opteq.analysis.gradients import GradientCost, compare_gradients
from opteq.analysis.local import LocalCertificate, local_certificate
from opteq.analysis.rescaled import Counterfactual, Rescaled, counterfactuals
from opteq.analysis.saliency import saliency_map
from opteq.analysis.terms import LayerTerms, objective_terms

__all__ = [
    "APGD",
    "PGD",
    "CertifiedClassifier",
    "CertifiedRadius",
    "Counterfactual",
    "Evidence",
    "GradientCost",
    "LayerTerms",
    "LocalCertificate",
    "Rescaled",
    "attack",
    "attention",
    "attention_map",
    "bounds",
    "branches",
    "class_evidence",
    "compare_gradients",
    "counterfactuals",
    "grad_cam",
    "lipschitz_bound",
    "local_certificate",
    "measure_branches",
    "objective_terms",
    "reconstructed_perturbation",
    "saliency",
    "saliency_map",
    "terms",
]
