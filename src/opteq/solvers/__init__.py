"""Fixed-point solvers: one loop, one stopping rule, four methods."""

from opteq.solvers.anderson import Anderson
from opteq.solvers.base import Outcome, Solver
from opteq.solvers.broyden import Broyden
from opteq.solvers.picard import Picard
from opteq.solvers.sam import SAM
from opteq.solvers.status import Status

__all__ = ["SAM", "Anderson", "Broyden", "Outcome", "Picard", "Solver", "Status"]
