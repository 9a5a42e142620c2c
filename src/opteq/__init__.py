"""Networks whose output solves an optimisation problem that a person can read and edit."""

from opteq import operators, penalties, regularizers
from opteq._errors import ConvergenceError, ConvergenceWarning
from opteq.equilibrium import Equilibrium
from opteq.gradients import Implicit, OneStep, Phantom, Shine, Unrolled
from opteq.problems import AffineOptEq, Branch, Certificate, DeepOptEq, HiddenProblem, OptEq, Splitting
from opteq.solution import Report, Solution
from opteq.solvers import SAM, Anderson, Broyden, Picard, Status
from opteq.solvers.linear import CG, GMRES, MINRES

__version__ = "0.1.0"

__all__ = [
    "CG",
    "GMRES",
    "MINRES",
    "SAM",
    "AffineOptEq",
    "Anderson",
    "Branch",
    "Broyden",
    "Certificate",
    "ConvergenceError",
    "ConvergenceWarning",
    "DeepOptEq",
    "Equilibrium",
    "HiddenProblem",
    "Implicit",
    "OneStep",
    "OptEq",
    "Phantom",
    "Picard",
    "Report",
    "Shine",
    "Solution",
    "Splitting",
    "Status",
    "Unrolled",
    "operators",
    "penalties",
    "regularizers",
]
