"""Random changes to training images: their options, random numbers and computation."""

from opteq.data.augmentation.options import Augmentation

__all__ = ["Augmentation"]
