"""How exactly torch was told to multiply numbers of float32."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


def products() -> tuple[Hashable, Hashable]:
    """The precision of matrix products, and of convolutions, as the torch at hand has it."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    convolutions: Any = getattr(cudnn, "conv", None)
    if hasattr(convolutions, "fp32_precision"):  # torch 2.9, where reading the older flags may raise
        return cuda.fp32_precision, convolutions.fp32_precision
    return cuda.allow_tf32, cudnn.allow_tf32


def convolutions_may_round() -> bool:
    """Whether cuDNN may compute convolutions of float32 in TF32."""
    return torch.backends.cudnn.enabled and products()[1] in ("tf32", True)
