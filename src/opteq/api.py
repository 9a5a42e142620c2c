"""The public names of ``import opteq``."""

from opteq import analysis, couplings, engine, kernels, models, operators, penalties, plot, potentials, regularizers
from opteq.common.errors import ConvergenceError, ConvergenceWarning
from opteq.equilibrium import Equilibrium
from opteq.gradients import Implicit, OneStep, Phantom, Shine, Unrolled
from opteq.models.blocks.fusion import AverageBranches
from opteq.problems import (
    GEQ,
    AffineOptEq,
    Branch,
    Certificate,
    DeepOptEq,
    FixedPoint,
    HiddenProblem,
    Inhibited,
    Inhibition,
    MOptEq,
    Objective,
    OptEq,
    Parallel,
    POptEq,
    Splitting,
)
from opteq.solution import Report, Solution
from opteq.solvers import FISTA, SAM, Anderson, Broyden, Picard, Status
from opteq.solvers.linear import CG, GMRES, MINRES

__all__ = [
    "CG",
    "FISTA",
    "GEQ",
    "GMRES",
    "MINRES",
    "SAM",
    "AffineOptEq",
    "Anderson",
    "AverageBranches",
    "Branch",
    "Broyden",
    "Certificate",
    "ConvergenceError",
    "ConvergenceWarning",
    "DeepOptEq",
    "Equilibrium",
    "FixedPoint",
    "HiddenProblem",
    "Implicit",
    "Inhibited",
    "Inhibition",
    "MOptEq",
    "Objective",
    "OneStep",
    "OptEq",
    "POptEq",
    "Parallel",
    "Phantom",
    "Picard",
    "Report",
    "Shine",
    "Solution",
    "Splitting",
    "Status",
    "Unrolled",
    "analysis",
    "couplings",
    "engine",
    "kernels",
    "models",
    "operators",
    "penalties",
    "plot",
    "potentials",
    "regularizers",
]
