"""Settings for all tests."""

from __future__ import annotations

import os

import torch

# The tensors here are tiny and the tests run in several processes: more threads would only get in each other's way.
torch.set_num_threads(1)

# Where there is no GPU, Triton's interpreter runs the fused kernels. It has to be known before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
