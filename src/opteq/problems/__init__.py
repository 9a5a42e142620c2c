"""Hidden problems: what a network minimises."""

from opteq.problems.base import HiddenProblem, Problem
from opteq.problems.branches.branch import Branch
from opteq.problems.branches.inhibited import Inhibited
from opteq.problems.branches.mopteq import MOptEq
from opteq.problems.branches.parallel import Parallel
from opteq.problems.branches.popteq import POptEq
from opteq.problems.certificate import Certificate
from opteq.problems.deep.deep_opteq import DeepOptEq
from opteq.problems.fixed_point import FixedPoint
from opteq.problems.geq import GEQ
from opteq.problems.hidden import BoundMap, Hidden, Structure
from opteq.problems.inhibition import Inhibition
from opteq.problems.objective import Objective
from opteq.problems.opteq import OptEq
from opteq.problems.variants import AffineOptEq, Splitting

__all__ = [
    "GEQ", "AffineOptEq", "BoundMap", "Branch", "Certificate", "DeepOptEq", "FixedPoint", "Hidden", "HiddenProblem",
    "Inhibited", "Inhibition", "MOptEq", "Objective", "OptEq", "POptEq", "Parallel", "Problem",
    "Splitting", "Structure",
]  # fmt: skip
