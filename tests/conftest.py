"""Settings for all tests."""

from __future__ import annotations

import os
import zlib

import pytest
import torch

# The tensors here are tiny and the tests run in several processes: more threads would only get in each other's way.
torch.set_num_threads(1)

# Where there is no GPU, Triton's interpreter runs the fused kernels. It has to be known before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# The laws are products of cases, solvers, gradients and dtypes. Three quarters of the combinations of a law are left to
# `make test-all`: which ones is told by their names, so that it is the same ones everywhere, and every case, solver and
# gradient occurs.
_THINNED = ("test_laws_", "test_regularizers", "test_penalties", "test_solvers", "test_hooks", "test_aliases")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        chosen = zlib.crc32(item.nodeid.encode()) % 4 == 0
        if item.path.name.startswith(_THINNED) and "[" in item.nodeid and not chosen:
            item.add_marker(pytest.mark.slow)
