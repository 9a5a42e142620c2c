"""Fixed-point solvers: one loop, one stopping rule, five methods."""

from opteq.solvers.anderson import Anderson
from opteq.solvers.base import Outcome, Solver
from opteq.solvers.broyden import Broyden
from opteq.solvers.fista import FISTA
from opteq.solvers.picard import Picard
from opteq.solvers.sam import SAM
from opteq.solvers.status import Status

__all__ = ["FISTA", "SAM", "Anderson", "Broyden", "Outcome", "Picard", "Solver", "Status"]
