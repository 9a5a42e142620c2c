"""What captures of CUDA graphs need: a pool and a stream to capture on, and memory of the host that graphs write to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from opteq._capturing import mend_generator, no_garbage_collected
from opteq._fast import settings
from opteq.solvers.buffers import SharedBuffers

Result = TypeVar("Result")


def raw_stream(device: torch.device) -> int:
    """The current stream of a device, as the driver knows it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def on(device: torch.device) -> AbstractContextManager[object]:
    """``device`` as the current one: streams and kernels are those of the current device, whatever tensors are on."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


class Workshop:
    """Where solves of one stream are captured: their pool of memory, their buffers, and a stream aside."""

    _all: ClassVar[dict[tuple[torch.device, int], Workshop]] = {}

    def __init__(self, device: torch.device, stream: int) -> None:
        self.key = device, stream
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.buffers = SharedBuffers()

    @classmethod
    def here(cls, device: torch.device) -> Workshop:
        """That of the stream in force.

        Solves hand memory on within the order of a stream only; those of another stream have a pool of their own.
        """
        key = device, raw_stream(device)
        if key not in cls._all:
            cls._all[key] = cls(*key)
        return cls._all[key]

    @classmethod
    def retire(cls, device: torch.device) -> None:
        """Let the next solve of the stream in force have another pool."""
        cls._all.pop((device, raw_stream(device)), None)

    @classmethod
    def close_all(cls) -> None:
        """Forget all workshops; what graphs still hold goes with them."""
        cls._all.clear()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """On the stream aside, after all that was launched before and before all that comes after."""
        # Tensors of inference mode could not be written to outside of it, and the next batch may come from there.
        with no_garbage_collected(), torch.inference_mode(False), torch.no_grad():
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                yield
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def record(self, work: Callable[[], Result], keep: bool = False) -> tuple[Any, Result]:
        """A graph of ``work``, and what that returns; to be called inside of :meth:`entered`.

        With ``keep`` it can become part of another graph, and is made ready to run only when it is replayed itself.
        """
        graph = torch.cuda.CUDAGraph(keep_graph=True) if keep else torch.cuda.CUDAGraph()
        recording, settings.recording = settings.recording, True
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            result = work()
            graph.capture_end()
        except BaseException:
            # The allocator may take the pool for one that is still recorded to: the next capture has another one.
            self._all.pop(self.key, None)
            _abandon(graph)
            raise
        finally:
            settings.recording = recording
        return graph, result


def _abandon(graph: Any) -> None:
    """End a capture that failed, and let random numbers be drawn again."""
    try:
        graph.capture_end()
    except RuntimeError:
        mend_generator()


class HostSlots:
    """Page-locked memory of the host that the stages of a solve write to, one slot each.

    None is ever handed back to the system, or to anybody but another solve of the same stream: a graph that is dropped
    while it still runs would write into what is somebody else's by then.
    """

    _free: ClassVar[dict[tuple[int, int], list[Tensor]]] = {}

    def __init__(self, size: int, stream: int) -> None:
        self.size = size
        self.free = self._free.setdefault((size, stream), [])
        self.own: list[Tensor] = []
        weakref.finalize(self, self.free.extend, self.own)

    def prepare(self) -> None:
        """Make room for one stage; no memory can be had while a graph is captured."""
        room = (
            torch.empty(self.size, dtype=torch.uint8, device="cpu", pin_memory=True)
            if not self.free
            else self.free.pop()
        )
        self.own.append(room)

    def next(self, like: Tensor) -> Tensor:
        """What was prepared last, as a place for ``like``."""
        size = like.numel() * like.element_size()
        if size > self.size:
            raise RuntimeError(f"a solve of {like.numel()} rows, more than any dimension of its inputs")
        return self.own[-1][:size].view(like.dtype).view(like.shape)
