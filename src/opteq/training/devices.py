"""Where a run computes: one accelerate engine from what a recipe asks for."""

from __future__ import annotations

import torch
from accelerate import Accelerator, DistributedType  # type: ignore[import-untyped,unused-ignore]
from accelerate.state import AcceleratorState  # type: ignore[import-untyped,unused-ignore]
from accelerate.utils import gather_object  # type: ignore[import-untyped,unused-ignore]

from opteq.common.errors import UserError, unknown_name

__all__ = ["DEVICES", "PRECISIONS", "Accelerator", "engine", "gather_object"]

DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("no", "bf16", "fp16")


def engine(device: str, precision: str, tf32: bool = True, threads: int | None = None) -> Accelerator:
    """The accelerator for ``device`` (``auto``, ``cpu``, ``cuda``) and ``precision`` (``no``, ``bf16``, ``fp16``).

    Processes and machines are those that ``accelerate launch`` or ``torchrun`` started this one with. TensorFloat-32
    and the number of threads are settings of the whole process, and stay as they are set here.

    Raises:
        UserError: the name is none of these, there is no such device here, or it cannot compute in that precision.
    """
    for what, value, known in (("device", device, DEVICES), ("precision", precision, PRECISIONS)):
        if value not in known:
            raise unknown_name(what, value, known)
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise UserError(
            'device "cuda" was asked for, but torch sees no GPU here: use train.device=cpu or train.device=auto '
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
        # accelerate keeps its settings for the life of the process and refuses others; a second run in one
        # process, in a notebook say, may well want others.
        AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=precision)
    # A launcher may name a number here, by which accelerate would divide every gradient; recipes have train.accumulate.
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
    # Batches of an epoch are all of one size, so the fastest convolution is worth looking for once.
    torch.backends.cudnn.benchmark = not on_cpu
    return accelerator
