"""The accelerator of a run, from the device and precision of its recipe."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, DistributedType  # type: ignore[import-untyped,unused-ignore]
from accelerate.state import AcceleratorState  # type: ignore[import-untyped,unused-ignore]
from accelerate.utils import gather_object  # type: ignore[import-untyped,unused-ignore]

from opteq.common.errors import UserError, unknown_name

__all__ = ["DEVICES", "PRECISIONS", "Accelerator", "gather_object", "make_accelerator", "peak_memory_mb"]

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("no", "bf16", "fp16")


def make_accelerator(device: str, precision: str, tf32: bool = True, threads: int | None = None) -> Accelerator:
    """The accelerator for ``device`` (``auto``, ``cpu``, ``cuda``) and ``precision`` (``no``, ``bf16``, ``fp16``).

    Processes and machines come from ``accelerate launch`` or ``torchrun``. TensorFloat-32 and the number of threads are
    set for the whole process.

    Raises:
        UserError: an unknown name, a device that is not available, or a precision that it does not support.
    """
    for what, value, known in (("device", device, DEVICES), ("precision", precision, PRECISIONS)):
        if value not in known:
            raise unknown_name(what, value, known)
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise UserError(
            'device "cuda" needs a GPU, and torch finds none: use train.device=cpu or train.device=auto '
            "(evaluate: --device cpu), or install a CUDA build of torch and check nvidia-smi"
        )
    on_cpu = device == "cpu" or not has_gpu
    if on_cpu and precision == "fp16":
        raise UserError(
            'precision "fp16" needs a GPU; on a CPU use train.precision=no or train.precision=bf16 (evaluate: '
            "--precision no)"
        )
    if not on_cpu and precision == "bf16" and not torch.cuda.is_bf16_supported():
        raise UserError(
            'precision "bf16" needs a newer GPU than this one; use train.precision=fp16 (evaluate: --precision fp16)'
        )
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        # accelerate keeps its settings for the life of the process; a second run in it may need others.
        AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=precision)
    # A launcher may set this, and accelerate would divide every gradient by it; recipes have train.accumulate.
    accelerator.gradient_accumulation_steps = 1
    plain = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if accelerator.distributed_type not in plain:
        raise UserError(
            f"accelerate was configured for {accelerator.distributed_type.value}; opteq trains with one process or "
            "with data-parallel ones (MULTI_GPU, MULTI_CPU): run `accelerate config` again, or use torchrun"
        )
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    if threads is not None:
        torch.set_num_threads(threads)
    # All batches have the same size, so autotuning convolutions once pays off.
    torch.backends.cudnn.benchmark = not on_cpu
    return accelerator


def peak_memory_mb(device: torch.device) -> float | None:
    """The most memory that this process has used so far, in MiB: tensors on a GPU, all of it on a CPU.

    None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
