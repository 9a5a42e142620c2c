"""Linear solvers for backward passes: matrix-free, a batch at once, each sample by itself."""

from opteq.solvers.linear.base import LinearSolver
from opteq.solvers.linear.cg import CG
from opteq.solvers.linear.gmres import GMRES
from opteq.solvers.linear.minres import MINRES

__all__ = ["CG", "GMRES", "MINRES", "LinearSolver"]
