"""Data sets of uint8 images in a memory-mapped cache, and batches that do not depend on the number of processes."""

from opteq.data.augmentation.options import Augmentation
from opteq.data.batches import Batches
from opteq.data.dataset import Dataset, Split
from opteq.data.loading import load, names

__all__ = ["Augmentation", "Batches", "Dataset", "Split", "load", "names"]
