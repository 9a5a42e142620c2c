"""CUDA graphs with conditional nodes.

From captured graphs a larger one is put together, in which the device reads some flags and takes one branch or the
other, without the host. Torch has no functions for that; NVIDIA's bindings of the driver have, which come with torch's
builds for CUDA. Where they, the driver or torch are too old (branches with two sides came with CUDA 12.8),
:func:`available` says so.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from opteq.engine.cuda_graphs.capture import CaptureContext, raw_stream

# Which way a fork goes is set by a kernel, with a function that only the driver has: so it is assembled by the driver.
# One block of 128 threads looks whether any of `count` flags is set.
_LOOK = b"""
.version 7.0
.target sm_70
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 fork, .param .b32 way);
.visible .entry look(.param .u64 flags, .param .u32 count, .param .u64 fork)
{
    .reg .pred %past, %set, %any, %other;
    .reg .b32 %thread, %place, %count, %flag, %seen, %way;
    .reg .b64 %base, %offset, %at, %fork;
    ld.param.u64 %base, [flags];
    cvta.to.global.u64 %base, %base;
    ld.param.u32 %count, [count];
    ld.param.u64 %fork, [fork];
    mov.u32 %thread, %tid.x;
    mov.u32 %place, %thread;
    mov.u32 %seen, 0;
NEXT:
    setp.ge.u32 %past, %place, %count;
    @%past bra ALL;
    mul.wide.u32 %offset, %place, 4;
    add.u64 %at, %base, %offset;
    ld.global.u32 %flag, [%at];
    or.b32 %seen, %seen, %flag;
    add.u32 %place, %place, 128;
    bra NEXT;
ALL:
    setp.ne.u32 %set, %seen, 0;
    bar.red.or.pred %any, 0, %set;
    setp.ne.u32 %other, %thread, 0;
    @%other bra END;
    selp.u32 %way, 1, 0, %any;
    {
        .param .b64 to;
        .param .b32 set;
        st.param.b64 [to], %fork;
        st.param.b32 [set], %way;
        call.uni cudaGraphSetConditional, (to, set);
    }
END:
    ret;
}
"""
_THREADS = 128


class GraphRefusedError(RuntimeError):
    """The driver will not have a graph: behind a fork not everything is allowed that a graph may do elsewhere."""


class Subgraph:
    """Part of a graph: one piece of work after the other, and forks."""

    def __init__(self, tools: SimpleNamespace, root: Any, graph: Any, parts: list[Any]) -> None:
        self._tools = tools
        self._root = root
        self._graph = graph
        self._parts = parts  # what the whole is made of, to be kept as long as it is
        self._after: list[Any] = []

    def then(self, captured: Any) -> None:
        """Go on with a graph that was captured to be kept."""
        driver, after = self._tools.driver, self._after
        own = driver.CUgraph(captured.raw_cuda_graph())
        self._after = [_done(driver.cuGraphAddChildGraphNode(self._graph, after, len(after), own))]
        self._parts.append(captured)

    def fork(self, flags: Tensor) -> tuple[Subgraph, Subgraph]:
        """Where to go on if any of ``flags``, which are int32, is set at that time, and where if none is."""
        tools, driver = self._tools, self._tools.driver
        handle = _done(
            driver.cuGraphConditionalHandleCreate(self._root, tools.context, 0, driver.CU_GRAPH_COND_ASSIGN_DEFAULT)
        )
        look = driver.CUDA_KERNEL_NODE_PARAMS()
        look.func, look.ctx = tools.look, tools.context
        look.gridDimX = look.gridDimY = look.gridDimZ = look.blockDimY = look.blockDimZ = 1
        look.blockDimX = _THREADS
        look.kernelParams = (
            (flags.data_ptr(), flags.numel(), int(handle)),
            (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64),
        )
        looked = _done(driver.cuGraphAddKernelNode(self._graph, self._after, len(self._after), look))
        fork = driver.CUgraphNodeParams()
        fork.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        fork.conditional.handle, fork.conditional.ctx = handle, tools.context
        fork.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
        fork.conditional.size = 2
        self._after = [_done(tools.add_node(self._graph, [looked], None, 1, fork))]
        self._parts.append(flags)
        one, other = fork.conditional.phGraph_out
        return tuple(Subgraph(tools, self._root, graph, self._parts) for graph in (one, other))  # type: ignore[return-value]


class ConditionalGraph:
    """A graph put together from captured ones, along the way that begins at :attr:`start`.

    After :meth:`instantiated` it can be replayed, and nothing added.
    """

    # Nothing here refers to itself: a graph that waits for the garbage collector may be destroyed by it while another
    # one is captured, which ends that.
    def __init__(self, device: torch.device) -> None:
        self.device = device
        tools = _tools(device)
        self._driver = tools.driver
        self._root = _done(self._driver.cuGraphCreate(0))
        self._parts: list[Any] = []
        self.start = Subgraph(tools, self._root, self._root, self._parts)
        weakref.finalize(self, self._driver.cuGraphDestroy, self._root).atexit = False

    def instantiated(self) -> ConditionalGraph:
        """The graph, ready to run."""
        self._runnable = _done(self._driver.cuGraphInstantiate(self._root, 0))
        weakref.finalize(self, self._driver.cuGraphExecDestroy, self._runnable).atexit = False
        return self

    def replay(self) -> None:
        """Run it on the current stream."""
        _done((*self._driver.cuGraphLaunch(self._runnable, raw_stream(self.device)), None))


def available(device: torch.device) -> bool:
    """Whether graphs with forks can be had for a device."""
    if torch.version.cuda is None or device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return _works(torch.device("cuda", index))


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether a fork goes where it should, tried once."""
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            # From bool, as flags of rows may be: a kernel is loaded at its first launch, which a capture may forbid.
            flags, went = (torch.zeros(300, dtype=torch.bool, device=device).to(torch.int32) for _ in range(2))
            went.fill_(3)
            context = CaptureContext(device, raw_stream(device))  # of its own: its pool goes with these two
            with context.entered():
                (one, _), (other, _) = (context.record(partial(went.fill_, way)) for way in (1, 2))
            graph = ConditionalGraph(device)
            first, second = graph.start.fork(flags)
            first.then(one)
            second.then(other)
            graph.instantiated()
            ways = []
            for flag in (0, 1):
                flags[-1] = flag
                graph.replay()
                ways.append(went.tolist())
            return ways == [[2] * 300, [1] * 300]
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        return False


@functools.cache
def _tools(device: torch.device) -> SimpleNamespace:
    """The driver, a device's context, and the kernel that looks at flags."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # which sees to a context
        context = _done(driver.cuCtxGetCurrent())
        module = _done(driver.cuModuleLoadData(_LOOK + b"\0"))
    look = _done(driver.cuModuleGetFunction(module, b"look"))
    # The version that takes notes on edges: of another name in CUDA 12, the only one in CUDA 13.
    add_node = getattr(driver, "cuGraphAddNode_v2", driver.cuGraphAddNode)
    return SimpleNamespace(driver=driver, context=context, module=module, look=look, add_node=add_node)


def _done(answer: tuple[Any, ...]) -> Any:
    """The results of a driver call, without its status."""
    state, value = answer
    if int(state) != 0:
        raise GraphRefusedError(f"the CUDA driver refused part of a graph: {state.name}")
    return value
