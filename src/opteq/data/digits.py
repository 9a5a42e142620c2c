"""The 8x8 digits that ship inside scikit-learn: no download, no cache."""

from __future__ import annotations

import numpy as np
import torch

from opteq.data.dataset import Dataset, Labels, Split, colours


def held_out(labels: Labels) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which samples are the test split: of every class each fifth one, in the order of the file.

    There is no random number in it, so the split is the same for everybody, with any version of any library, and each
    class keeps its share (stratified). The file goes writer by writer, so both splits have digits of every writer.
    """
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        chosen[np.flatnonzero(labels == label)[4::5]] = True
    return chosen


def load_digits() -> Dataset:
    """1797 grey digits of 8x8 pixels: four fifths to train on, one fifth held out."""
    from sklearn.datasets import load_digits as read  # late: only this function needs scikit-learn

    file = read()
    # The file has 17 grey values, 0..16.
    images = np.rint(file.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = file.target.astype(np.int64)
    test = held_out(labels)
    mean, std = colours([images[~test]], channels=1)
    train_split, test_split = (
        Split(torch.from_numpy(images[rows]), torch.from_numpy(labels[rows])) for rows in (~test, test)
    )
    return Dataset("digits", tuple("0123456789"), train_split, test_split, mean, std)
