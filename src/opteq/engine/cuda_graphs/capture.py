"""Captures of CUDA graphs: a memory pool, a stream to capture on, and cleanup after a failure."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch

from opteq.engine.cuda_graphs.buffers import SharedBuffers

Result = TypeVar("Result")

_one_at_a_time = threading.RLock()


@contextmanager
def capture_lock() -> Iterator[bool]:
    """Whether this thread may capture and replay graphs now; while it may, no other thread does.

    Graphs of a stream share buffers. The device executes work in the order of the stream, so it is enough that
    no launch of another thread comes between those that copy inputs in, replay a graph and copy its outputs out.

    Other threads wait for their turn. A backward pass does not, and takes the plain path instead: the thread that has
    its turn may be capturing something that needs autograd's thread, which is the one that would wait.
    """
    mine = _one_at_a_time.acquire(blocking=torch._C._current_graph_task_id() == -1)
    try:
        yield mine
    finally:
        if mine:
            _one_at_a_time.release()


def raw_stream(device: torch.device) -> int:
    """The current stream of a device, as the driver knows it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def on(device: torch.device) -> AbstractContextManager[object]:
    """``device`` as the current one: streams and kernels are those of the current device, whatever tensors are on."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


class CaptureContext:
    """Where graphs of one stream are captured: their memory pool, their buffers, and a side stream."""

    known: ClassVar[dict[tuple[torch.device, int], CaptureContext]] = {}
    streams: ClassVar[dict[tuple[torch.device, int], Any]] = {}
    """Side streams outlive their contexts: cuBLAS keeps a workspace of 32 MiB for every stream that it has seen."""

    def __init__(self, device: torch.device, stream: int) -> None:
        self.key = device, stream
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        if self.key not in self.streams:
            self.streams[self.key] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stream = self.streams[self.key]
        self.buffers = SharedBuffers()

    @classmethod
    def here(cls, device: torch.device) -> CaptureContext:
        """That of the current stream. Graphs of another stream may run at the same time, and have another pool."""
        key = device, raw_stream(device)
        if key not in cls.known:
            cls.known[key] = cls(*key)
        return cls.known[key]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """On the side stream, after all work launched before and before all that is launched after."""
        # Tensors of inference mode could not be written to outside of it, and the next batch may come from there.
        with no_garbage_collection(), torch.inference_mode(False), torch.no_grad():
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                yield
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def record(self, work: Callable[[], Result]) -> tuple[Any, Result]:
        """A graph of ``work``, a part of other graphs, and what that returns; called inside of :meth:`entered`."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            result = work()
            graph.capture_end()
        except BaseException:
            # The allocator may take the pool for one that is still recorded to: the next capture has another one.
            self.known.pop(self.key, None)
            try:
                graph.capture_end()
            except RuntimeError:
                reset_generator()
            raise
        return graph, result


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """The collector may destroy graphs, events or streams, which invalidates a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def reset_generator() -> None:
    """Let random numbers be drawn again after a capture on the current device that failed.

    The generator has registered the beginning of the capture and no end; a copy of its state has registered neither.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
