"""A state is a tensor or a tuple of tensors; solvers see it as one matrix with one row per sample.

Their linear algebra runs in float32 or better, also under autocast; the map itself runs in the caller's precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from opteq.common.dynamo import constant

State = Tensor | tuple[Tensor, ...]
_FEW = 2**15  # Numbers that a CPU handles faster than the calls of torch that would let it handle fewer.


def blocks(state: State) -> tuple[Tensor, ...]:
    """The tensors of a state, as a tuple in either case."""
    return state if isinstance(state, tuple) else (state,)


def like(state: State, parts: tuple[Tensor, ...]) -> State:
    """``parts`` in the form that ``state`` has: a bare tensor or a tuple."""
    return parts if isinstance(state, tuple) else parts[0]


def single(state: State) -> Tensor:
    """The tensor of a state that has only one."""
    if isinstance(state, tuple):
        raise TypeError(f"this problem's state is one tensor; got a tuple of {len(state)}")
    return state


def map_state(function: Callable[..., Tensor], state: State, *others: State) -> State:
    """Apply ``function`` block by block."""
    columns = zip(blocks(state), *(blocks(other) for other in others), strict=True)
    return like(state, tuple(function(*column) for column in columns))


def sum_over_sample(tensor: Tensor) -> Tensor:
    """Sum over everything but the batch, in float32 or better: ``(B, ...) -> (B,)``."""
    return sample_rows(tensor).sum(dim=1, dtype=working_dtype(tensor.dtype))


def sample_rows(tensor: Tensor) -> Tensor:
    """A row for each sample, ``(B, ...) -> (B, N)``, in the order of memory: a channels-last image is not copied."""
    strides = tensor.stride()
    order = sorted(range(1, tensor.ndim), key=lambda dim: -strides[dim])
    return tensor.permute(0, *order).reshape(tensor.shape[0], math.prod(tensor.shape[1:]))


def inner(a: State, b: State) -> Tensor:
    """The inner product of two states, one value per sample."""
    return total(sum_over_sample(u.to(working_dtype(u.dtype)) * v) for u, v in zip(blocks(a), blocks(b), strict=True))


def total(parts: Iterable[Tensor]) -> Tensor:
    """The sum of some tensors of one shape."""
    first, *others = parts
    return torch.stack([first, *others]).sum(dim=0) if others else first


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and small linear algebra run in: never less than float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widest_dtype(tensor: Tensor) -> torch.dtype:
    """float64, where the tensor's device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def row_norms(matrix: Tensor) -> Tensor:
    """Euclidean norm of each row, accumulated in float64 where the device has it.

    Squares of float32 numbers overflow at 1e19 and vanish at 1e-23, which is well inside what a diverging or a
    dying network produces; in float64 they do neither.
    """
    dtype = widest_dtype(matrix)
    # For many float32 numbers on a CPU, float64 would be a copy that costs more than a look at the norms.
    if matrix.dtype == torch.float32 and matrix.numel() > _FEW and may_branch_on_values(matrix):
        short = torch.linalg.vector_norm(matrix, dim=-1).to(dtype)
        fits = (short > 1e-15) & (short < 1e18)  # no row depends on what others hold
        return short if bool(fits.all()) else torch.where(fits, short, row_norms(matrix.to(dtype)))
    return cast(Tensor, torch.linalg.vector_norm(matrix, dim=-1, dtype=dtype))


def norms_of_rows(*matrices: Tensor) -> Sequence[Tensor]:
    """:func:`row_norms` of matrices of one shape."""
    few = matrices[0].numel() <= _FEW and may_branch_on_values(matrices[0])
    return row_norms(torch.stack(matrices)).unbind() if few else [row_norms(matrix) for matrix in matrices]


def is_tracked(tensor: Tensor) -> bool:
    """Whether autograd tracks a tensor, at any level of torch.func: ``requires_grad`` is about the innermost one."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.requires_grad or (wrapped and is_tracked(torch._C._functorch.get_unwrapped(tensor)))


def may_branch_on_values(tensor: Tensor) -> bool:
    """Whether Python may branch on values: they are on the CPU, and nothing traces, compiles or batches."""
    traced = torch._C._get_tracing_state() is not None  # by torch.jit.trace
    written = traced or torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    # Batched, by torch.func or by is_grads_batched of torch.autograd.
    batched = torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(tensor)
    return tensor.device.type == "cpu" and not written and not batched


def any_row(mask: Tensor, of_all: bool = False) -> bool:
    """Whether any entry is set. Under vmap, which hides entries: False, or with ``of_all`` of all samples together."""
    try:
        return bool(mask.any())
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
    while of_all and torch._C._functorch.is_functorch_wrapped_tensor(mask):
        mask = torch._C._functorch.get_unwrapped(mask)
    return of_all and bool(mask.any())


def surely_all(mask: Tensor) -> bool:
    """True where Python may look at a mask, and finds every entry set: what it makes a difference to is left out."""
    return may_branch_on_values(mask) and all(mask.tolist())


def choose_rows(mask: Tensor, new: Tensor, old: Tensor | float) -> Tensor:
    """The rows of ``new`` where the mask is set, else those of ``old``; not copied where all are of one."""
    if may_branch_on_values(mask):
        chosen = mask.tolist()
        if all(chosen):
            return new
        if isinstance(old, Tensor) and not any(chosen):
            return old
    return torch.where(mask[:, None] if new.ndim > 1 else mask, new, old)


def nan_samples(state: State, coupled: bool = False) -> State:
    """The same state, NaN throughout in each sample (of a ``coupled`` state: in all) with an entry that is not finite.

    A single such entry could be lost on its way: a unit that is off drops it.
    """
    parts = blocks(state)
    if all(map(surely_finite, parts)):
        return state
    finite = torch.stack([sample_rows(torch.isfinite(part)).all(dim=1) for part in parts]).all(dim=0)
    if coupled:
        finite = finite.all(dim=0, keepdim=True)
    return nan_rows(state, ~finite)


def per_row(numbers: Tensor, like: Tensor) -> Tensor:
    """Numbers ``(R,)`` shaped to multiply a tensor ``(R, ...)``, in its dtype."""
    return numbers.to(like.dtype).reshape(-1, *[1] * (like.ndim - 1))


def surely_finite(tensor: Tensor) -> bool:
    """True where the sum, which costs little, proves that all entries are finite."""
    return may_branch_on_values(tensor) and bool(torch.isfinite(tensor.detach().sum()))


def nan_rows(state: State, lost: Tensor) -> State:
    """The same state, NaN in the samples that ``lost`` names, ``(B,)``. Integers, which have no NaN, stay."""
    if may_branch_on_values(lost) and not lost.any():
        return state

    def one(part: Tensor) -> Tensor:
        has_nan = part.is_floating_point() or part.is_complex()
        return torch.where(lost.reshape(-1, *[1] * (part.ndim - 1)), torch.nan, part) if has_nan else part

    return map_state(one, state)


def copy_if_shared(state: State, other: State) -> State:
    """The same state, copied where it lies in the memory of ``other``."""
    if torch._C._are_functorch_transforms_active():  # which give out no memory
        return state
    storages = {part.untyped_storage().data_ptr() for part in blocks(other)}
    return map_state(lambda part: part.clone() if part.untyped_storage().data_ptr() in storages else part, state)


def zeros_per_row(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Zeros ``(R, *shape)`` for the R rows of ``like``; under vmap they are batched as it is, and can be written to."""
    first = torch.zeros_like(like[:, 0] if like.shape[1] else like.sum(dim=1), dtype=dtype or like.dtype)
    return first.reshape(like.shape[0], *[1] * len(shape)).repeat(1, *shape)


@dataclass(frozen=True)
class Layout:
    """How a state lies in a matrix ``(B, N)``.

    A channels-last image is flattened in its own memory order, so that packing it copies nothing. The matrix is in
    float32 or better for every dtype of the state: sums of bfloat16 differences would be noise.

    ``coupled`` states, whose samples depend on each other, are one row: their batch is solved as a whole.
    """

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    channels_last: tuple[bool, ...]
    device: torch.device
    is_tuple: bool
    coupled: bool = False

    @classmethod
    def of(cls, state: State, coupled: bool = False) -> Layout:
        """The layout of ``state``, which serves as the template for every later one."""
        parts = blocks(state)
        if not parts:
            raise ValueError("a state needs at least one tensor; got an empty tuple")
        for part in parts:
            if not isinstance(part, Tensor) or part.ndim < 1:
                raise TypeError(f"a state holds tensors whose first dimension is the batch; got {part!r}")
            if not part.is_floating_point():
                raise TypeError(f"a state holds floating-point tensors; got {part.dtype}")
            if part.shape[0] != parts[0].shape[0]:
                raise ValueError(
                    f"all blocks of a state have the same batch size; got {[tuple(p.shape) for p in parts]}"
                )
            if part.device != parts[0].device:
                raise ValueError(f"all blocks of a state are on one device; got {[str(p.device) for p in parts]}")
        return cls(
            shapes=tuple(part.shape for part in parts),
            dtypes=tuple(part.dtype for part in parts),
            channels_last=tuple(is_channels_last(part) for part in parts),
            device=parts[0].device,
            is_tuple=isinstance(state, tuple),
            coupled=coupled,
        )

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.shapes[0][0]

    @property
    def rows(self) -> int:
        """Number of rows of the matrix: one per sample, or one in all where samples are coupled."""
        return 1 if self.coupled else self.batch

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix."""
        return torch.float64 if torch.float64 in self.dtypes else torch.float32

    @property
    def exact(self) -> bool:
        """Whether :meth:`unpack` keeps every digit of the matrix."""
        return all(dtype == self.dtype for dtype in self.dtypes)

    def check(self, state: State, what: str) -> None:
        """Raise unless ``state`` has the form, shapes and device of this layout, in any floating-point dtype."""
        if isinstance(state, tuple) != self.is_tuple or len(blocks(state)) != len(self.shapes):
            form = f"a tuple of {len(self.shapes)} tensors" if self.is_tuple else "one tensor"
            got = f"a tuple of {len(state)}" if isinstance(state, tuple) else "one tensor"
            raise ValueError(f"{what} should be {form}, like the starting state; got {got}")
        for part, shape in zip(blocks(state), self.shapes, strict=True):
            if not isinstance(part, Tensor) or not part.is_floating_point():
                got = str(part.dtype) if isinstance(part, Tensor) else type(part).__name__
                raise TypeError(f"{what} should be floating-point tensors, like the starting state; got {got}")
            if part.device != self.device:
                raise ValueError(f"{what} should be on {self.device}, like the starting state; got {part.device}")
            if part.shape != shape:
                raise ValueError(
                    f"{what} should have shape {tuple(shape)}, like the starting state; got {tuple(part.shape)}"
                )

    def pack(self, state: State) -> Tensor:
        """The state as a matrix ``(rows, N)``."""
        rows = [
            in_shape(part.movedim(1, -1) if last else part, (self.rows, self._width(shape)))
            for part, last, shape in zip(blocks(state), self.channels_last, self.shapes, strict=True)
        ]
        # Joined in their own dtype, the promoted one of mixed dtypes: half of the memory in half precision.
        return (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).to(self.dtype)

    def unpack(self, matrix: Tensor) -> State:
        """The inverse of :meth:`pack`, in the dtypes of the template."""
        widths = [self._width(shape) for shape in self.shapes]
        pieces = torch.split(matrix, widths, dim=1) if len(widths) > 1 else (matrix,)
        parts = []
        for piece, shape, dtype, last in zip(pieces, self.shapes, self.dtypes, self.channels_last, strict=True):
            part = piece.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1) if last else in_shape(piece, shape)
            parts.append(part.to(dtype))
        return tuple(parts) if self.is_tuple else parts[0]

    def restore(self, point: Tensor | tuple[Tensor, ...]) -> State:
        """A state from its matrix, or from its parts, in the dtypes of the template."""
        return self.unpack(point) if isinstance(point, Tensor) else self.typed(point)

    def typed(self, state: State) -> State:
        """The same state in the dtypes of the template, and in its form: one tensor or a tuple."""
        parts = tuple(part.to(dtype) for part, dtype in zip(blocks(state), self.dtypes, strict=True))
        return parts if self.is_tuple else parts[0]

    def per_sample(self, rows: Tensor) -> Tensor:
        """One value per row as one value per sample (coupled samples share theirs)."""
        return rows.expand(self.batch) if self.coupled else rows

    def _width(self, shape: torch.Size) -> int:
        return math.prod(shape) if self.coupled else math.prod(shape[1:])


def in_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``tensor.reshape(shape)``, which for the shape that it has is a call for nothing."""
    return tensor if tensor.shape == shape else tensor.reshape(shape)


def is_channels_last(tensor: Tensor) -> bool:
    """Whether an image's channels lie next to each other in memory."""
    # By strides, since torch.func does not answer is_contiguous with a memory format.
    if tensor.ndim != 4 or tensor.shape[1] == 1:
        return False
    _, channels, height, width = tensor.shape
    return tensor.stride() == (channels * height * width, 1, width * channels, channels)


@constant
def has_autocast(kind: str) -> bool:
    """Whether there is autocast for this type of device. (Not all compilers of torch know torch's own question.)"""
    return torch.amp.is_autocast_available(kind)


@dataclass(frozen=True)
class Autocast:
    """An autocast setting that can be entered again later, in the backward pass for instance."""

    device_type: str
    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def current(cls, device: torch.device) -> Autocast:
        """The setting in force now for ``device``."""
        kind = device.type
        if not has_autocast(kind):
            return cls(kind, enabled=False, dtype=None)
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def entered(self) -> AbstractContextManager[object]:
        """The setting in force again."""
        if self.dtype is None or not (self.enabled or torch.is_autocast_enabled(self.device_type)):
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)

    def off(self) -> AbstractContextManager[object]:
        """No autocast, independent of the caller's setting: Gram matrices of bfloat16 products would be noise."""
        if self.dtype is None or not self.enabled:
            return nullcontext()
        return torch.autocast(self.device_type, enabled=False)


class LowestPrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes the coarsest rounding of what is computed inside: autocast rounds products only, and an objective may have
    none.
    """

    eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        dtypes = {part.dtype for part in tree_leaves(results) if isinstance(part, Tensor) and part.is_floating_point()}
        self.eps = max([self.eps, *(torch.finfo(dtype).eps for dtype in dtypes)])
        return results


def autocast_rounding(layout: Layout, function: Callable[[], object]) -> float:
    """By how much autocast may put off what ``function`` computes, relative to it; 0 without autocast."""
    if not Autocast.current(layout.device).enabled:
        return 0.0
    with LowestPrecision() as lowest:  # type: ignore[no-untyped-call]  # torch's
        function()
    relative: float = 2 * lowest.eps
    return relative
