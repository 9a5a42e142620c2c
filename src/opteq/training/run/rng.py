"""The state of all random number generators, as tensors and JSON-able values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed(number: int) -> None:
    """Seed Python, NumPy and torch on all devices."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def capture() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The current state: large parts as tensors, the rest as JSON-able values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64))}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors["cuda"] = torch.cuda.get_rng_state()
    values = {
        "python": [version, list(words), gauss],
        "numpy": [str(name), int(position), int(has_gauss), float(cached)],
    }
    return tensors, values


def restore(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Return to a captured state."""
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    name, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"].cpu())
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"].cpu())


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the random state at the end of the block, so that a test pass does not change training."""
    before = capture()
    try:
        yield
    finally:
        restore(*before)
