"""Data sets of uint8 images, cached or streamed, and batches that do not depend on the number of processes."""

from opteq.data.augmentation.options import Augmentation
from opteq.data.batches import Batches
from opteq.data.dataset import Dataset, Split
from opteq.data.loading import load, names
from opteq.data.streaming import StreamedImages

__all__ = ["Augmentation", "Batches", "Dataset", "Split", "StreamedImages", "load", "names"]
