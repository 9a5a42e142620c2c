"""Whether a Triton kernel may take the place of torch's operations on given tensors, and how it is launched safely."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Hashable

import torch
from torch import Tensor

from opteq.engine.settings import settings

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_launched: set[Hashable] = set()


def may_launch(*tensors: Tensor) -> bool:
    """Whether kernels may run on ``tensors``: allowed, on a GPU or interpreted, and looked on by no transformation."""
    return (
        settings.triton
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and all(
            (tensor.is_cuda or settings.interpreted)
            and type(tensor) is Tensor  # others, such as torch's fake tensors, may have no memory
            and not torch._C._functorch.is_legacy_batchedtensor(tensor)
            and tensor.dtype in _DTYPES
            and tensor.numel() > 0
            for tensor in tensors
        )
        and _compiles_for(tensors[0].device)
    )


@functools.cache
def _compiles_for(device: torch.device) -> bool:
    """Whether Triton is there, and a device that it compiles all dtypes for."""
    if not has_triton():
        return False
    return device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured: a kernel that was not loaded before might not be loaded then."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def may_load(tensor: Tensor, *variant: Hashable) -> bool:
    """Whether a variant of a kernel has been launched, and so compiled and loaded, or can be now.

    None is loaded in the middle of a capture, where that may be forbidden: the solvers' own captures come after a solve
    that has launched the same ones.
    """
    if variant not in _launched and is_capturing(tensor):
        return False
    _launched.add(variant)
    return True


def columns(channels: int) -> int:
    """How many channels a program takes, a power of two: few programs should have places without a channel."""
    if channels <= 32:
        return 1 << (channels - 1).bit_length()
    return min((128, 64, 32), key=lambda wide: -(-channels // wide) * wide)


@functools.cache
def has_triton() -> bool:
    """Whether kernels can be compiled at all; where they cannot, one warning says so for all of them."""
    if importlib.util.find_spec("triton") is not None:
        return True
    warnings.warn("Triton is not installed, so captured solves on a GPU take longer than they need", stacklevel=2)
    return False
