"""Ways to differentiate an equilibrium; any of them goes with any solver."""

from opteq.gradients.base import Gradient
from opteq.gradients.implicit import Implicit
from opteq.gradients.phantom import OneStep, Phantom
from opteq.gradients.shine import Shine
from opteq.gradients.unrolled import Unrolled

__all__ = ["Gradient", "Implicit", "OneStep", "Phantom", "Shine", "Unrolled"]
