"""Settings for all tests."""

from __future__ import annotations

import torch

# The tensors here are tiny and the tests run in several processes: more threads would only get in each other's way.
torch.set_num_threads(1)
