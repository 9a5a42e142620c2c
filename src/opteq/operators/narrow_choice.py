"""Where convolutions may go by products of 16 bits, and whether they should: what is allowed, possible, and faster."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from opteq._fast import settings
from opteq._precision import convolutions_may_round
from opteq._triton import may_launch
from opteq.operators.choice import is_faster, is_known
from opteq.operators.narrow_products import Convolution

# Tests set it, to run the kernels by Triton's interpreter on a CPU.
_interpreted = False
# Channels come in multiples of it, as memory is read in such pieces.
_STEP = 16
# Operations below which a product takes little more than its launch; nothing is compiled for those.
_LEAST = 5 * 10**8
_refused: set[Hashable] = set()


def narrow_dtype(linear: Convolution, v: Tensor, adjoint: bool = False) -> torch.dtype | None:
    """The 16-bit dtype in which ``v`` may be multiplied; None where it may not, or kernels can't be used."""
    if torch.is_grad_enabled():
        return None
    found = narrow_dtype_on_tape(linear.weight, v, adjoint)
    # A map that was made outside of a region with autocast has no rounded weight.
    return None if found is None or (v.dtype == found) != (linear.acting.dtype == found) else found


def narrow_dtype_on_tape(weight: Tensor, v: Tensor, adjoint: bool = False) -> torch.dtype | None:
    """The same for a convolution with a weight, which may be put on a tape by its caller."""
    if not (v.is_cuda or _interpreted) or weight.dtype != torch.float32 or v.ndim != 4:
        return None
    # Whose members under a transformation can't be asked for their layout, for one.
    if torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(v):
        return None
    outputs, inputs = weight.shape[:2]
    if outputs % _STEP or inputs % _STEP or v.shape[1] != (outputs if adjoint else inputs):
        return None
    if 2 * v.numel() * weight.numel() < _LEAST * v.shape[1] or v.numel() == 0:
        return None
    if not (_interpreted or (may_launch(v, weight.detach()) and _has_kernels(v.device))):
        return None
    if not is_plain(v):
        return None
    if torch.is_autocast_enabled(v.device.type):
        dtype = torch.get_autocast_dtype(v.device.type)
        return dtype if v.dtype == dtype and dtype.itemsize == 2 else None
    return torch.float16 if v.dtype == torch.float32 and convolutions_may_round() else None


def is_plain(v: Tensor) -> bool:
    """Whether pictures are channels last, with the strides of their sizes even where those do not matter."""
    _, channels, height, width = v.shape
    return v.stride() == (channels * height * width, 1, width * channels, channels)


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    """Whether a device reads boxes of memory by itself, as NVIDIA's do since Hopper, and Triton knows about it."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:
        return False
    return hasattr(TensorDescriptor, "from_tensor")


def is_chosen(
    key: Hashable,
    v: Tensor,
    plain: Callable[[], Tensor],
    prepare: Callable[[], Callable[[], Tensor]],
    outside: bool = False,
) -> bool:
    """Whether the kernels are to be used now: while a graph is captured, where they are faster.

    Outside of captures the answer is no, and the two ways are tried for the captures to come.

    Args:
        key: what distinguishes the product.
        v: its argument.
        plain: the product by torch's operations.
        prepare: gives the same by the kernels.
        outside: whether they are to be used outside of captures, too, where they are faster.
    """
    if _interpreted:
        return True
    if key in _refused:
        return False
    if torch.cuda.is_current_stream_capturing():
        return is_faster(key)
    if not is_known(key):
        if not (settings.graphs or outside):  # no capture will come
            return False
        try:
            with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]  # whose time is measured
                is_faster(key, plain, prepare())
        except Exception as error:  # whatever a compiler may raise
            _refused.add(key)
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(f"kernels for a convolution could not be used: {message}", stacklevel=2)
    return outside and is_faster(key)


def was_chosen(key: Hashable) -> bool:
    """Whether the kernels of a key are used in captures, by what was measured before."""
    return _interpreted or (key not in _refused and is_faster(key))
