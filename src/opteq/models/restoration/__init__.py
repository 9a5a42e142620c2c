"""Image restoration: a data term, and a prior made of potentials of filter responses."""

from opteq.models.restoration.energy import FilterPrior, Restoration

__all__ = ["FilterPrior", "Restoration"]
