"""8x8 digits in a file of this package: no download, no cache.

They are the test set of E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
Repository, 1998 (https://doi.org/10.24432/C50P49), under the licence CC BY 4.0; scikit-learn has the same.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
import torch

from opteq.data.dataset import Dataset, Labels, Pixels, Split, channel_statistics


def read_digits() -> tuple[Pixels, Labels]:
    """All 1797 images ``(N, 8, 8)``, with values from 0 to 16, and their labels ``(N,)``."""
    with (
        (resources.files("opteq.data.readers") / "digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        return arrays["images"], arrays["labels"].astype(np.int64)


def test_mask(labels: Labels) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """A mask of the test split: every fifth sample of each class, in the order of the file.

    The split is stratified and contains no random number. The file is ordered by writer, so both splits have digits of
    every writer.
    """
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[4::5]] = True
    return chosen


def load_digits() -> Dataset:
    """1797 grey digits of 8x8 pixels: four fifths for training, one fifth for testing."""
    levels, labels = read_digits()
    images = np.rint(levels * (255 / 16)).astype(np.uint8)[:, None]
    test = test_mask(labels)
    mean, std = channel_statistics([images[~test]], channels=1)
    train_split, test_split = (
        Split(torch.from_numpy(images[rows]), torch.from_numpy(labels[rows])) for rows in (~test, test)
    )
    return Dataset("digits", tuple("0123456789"), train_split, test_split, mean, std)
