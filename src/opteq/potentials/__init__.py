"""Potentials: functions of filter responses, whose sums are priors."""

from opteq.potentials.base import Curve, Potential
from opteq.potentials.classic import Gaussian, GemanMcClure, Huber, Student
from opteq.potentials.spline import Spline

__all__ = ["Curve", "Gaussian", "GemanMcClure", "Huber", "Potential", "Spline", "Student"]
