"""Data sets as bytes, kept in a cache that processes share, and batches of them that do not depend on who asks."""

from opteq.data.augmentation.options import Augmentation
from opteq.data.batches import Batches
from opteq.data.dataset import Dataset, Split
from opteq.data.loading import load, names

__all__ = ["Augmentation", "Batches", "Dataset", "Split", "load", "names"]
