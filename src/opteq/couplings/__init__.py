"""Couplings of the branches of MOptEq: heritage H, diversity D, and their gradients.

Branches form a ring: the last is a neighbour of the first. For two neighbours, with channels compared pixel by pixel at
the coarser of their two sizes,

    M[a, b] = <channel a of one, channel b of the other>
    H = sum of the diagonal of M          (corresponding channels resemble each other)
    D = sum of |M| off the diagonal       (different channels carry different information)

and the energy of the ring is ``E = 1/2 sum over neighbours of (lambda D - H)``. MOptEq couples its branches by
``h = -grad E``.
"""

from opteq.couplings.coupling import Coupling, diversity, heritage
from opteq.couplings.ring import (
    Features,
    check_features,
    largest_neighbours,
    products,
    products_derivative,
    ring_norm,
)

__all__ = [
    "Coupling", "Features", "check_features", "diversity", "heritage", "largest_neighbours", "products",
    "products_derivative", "ring_norm",
]  # fmt: skip
