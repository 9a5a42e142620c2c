"""What the norm bound costs: one prepare() with its backward, against one training step of an OptEq layer.

A training step applies z -> W' relu(W z + c) 20 times forward and, in the implicit backward, its linearisation 20
times: 40 applications, 80 convolutions, without autograd tape. The bounded weight is computed once per step, whatever
the number of applications. The two are measured in turns, so that a change of clock or of load meets both; the share
is the median over turns of bound / (bound + step).

    python benchmarks/bound_cost.py --threads 2               # CPU: batch 64
    python benchmarks/bound_cost.py --threads 1 --cpu-time    # the same in processor time, where others use the machine
    python benchmarks/bound_cost.py --device cuda             # batch 128, operations launched one by one
    python benchmarks/bound_cost.py --device cuda --graph     # the same, each captured as a CUDA graph

The bound is a few hundred small operations: on a GPU, launched one by one, it costs what their launches cost, and
captured as a graph it costs what they compute.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from opteq.operators import Conv2d, LinearMap

# Channels in and out, side of the image; kernels are 3 x 3.
SHAPES = [(32, 64, 32), (64, 128, 32), (256, 256, 16), (256, 256, 8), (32, 128, 32), (128, 64, 16)]
APPLICATIONS = 20


def bounding(operator: Conv2d) -> Tensor:
    weight = operator.prepare().weight
    return torch.autograd.grad(weight, operator.weight, torch.ones_like(weight))[0]


@torch.no_grad()
def training_step(linear: LinearMap, z: Tensor, c: Tensor) -> Tensor:
    for _ in range(APPLICATIONS):
        z = linear.adjoint(torch.relu(linear(z) + c))
    v, active = z, c > 0
    for _ in range(APPLICATIONS):
        v = linear.adjoint(linear(v) * active)
    return v


def captured(work: Callable[[], Tensor]) -> Callable[[], None]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def milliseconds(
    work: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (clock() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=None, help="default: 128 on a GPU, 64 on a CPU")
    parser.add_argument("--repeats", type=int, default=None, help="default: 30 on a GPU, 5 on a CPU")
    parser.add_argument("--bounds", type=int, default=3, help="bounds in a turn, whose median counts")
    parser.add_argument("--shape", type=int, nargs=3, action="append", help="channels in, out and side; repeatable")
    parser.add_argument("--cpu-time", action="store_true", help="processor time of this process, not wall-clock time")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads")
    parser.add_argument("--graph", action="store_true", help="capture both as CUDA graphs")
    parser.add_argument("--tf32", action="store_true", help="allow TensorFloat-32 in matrix products too")
    options = parser.parse_args()
    device = torch.device(options.device)
    clock = time.process_time if options.cpu_time else time.perf_counter
    batch = options.batch or (128 if device.type == "cuda" else 64)
    repeats = options.repeats or (30 if device.type == "cuda" else 5)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.tf32:
        torch.set_float32_matmul_precision("high")

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}; torch {torch.__version__}; batch {batch}; medians of {repeats} turns")
    print(f"{'channels':>12} {'image':>8} {'bound ms':>10} {'step ms':>10} {'share':>7}")
    for inputs, outputs, side in options.shape or SHAPES:
        torch.manual_seed(0)
        operator = Conv2d(inputs, outputs, 3, bound=0.95).to(device)
        with torch.no_grad():
            operator.weight.mul_(2)  # above the bound, so that the bound acts
            linear = operator.prepare()
        z, c = (
            torch.randn(batch, channels, side, side, device=device).contiguous(memory_format=torch.channels_last)
            for channels in (inputs, outputs)
        )
        bound: Callable[[], object] = partial(bounding, operator)
        step: Callable[[], object] = partial(training_step, linear, z, c)
        if options.graph:
            bound, step = captured(partial(bounding, operator)), captured(partial(training_step, linear, z, c))
        pairs = []
        for _ in range(repeats + 1):
            spent = statistics.median(milliseconds(bound, device, clock) for _ in range(options.bounds))
            pairs.append((spent, milliseconds(step, device, clock)))
        pairs = pairs[1:]  # the first turn pays for warm-up
        bound_ms, step_ms = (statistics.median(times) for times in zip(*pairs, strict=True))
        share = statistics.median(b / (b + s) for b, s in pairs)
        pixels = f"{side} x {side}"
        print(f"{f'{inputs}->{outputs}':>12} {pixels:>8} {bound_ms:10.2f} {step_ms:10.1f} {share:7.2%}", flush=True)


if __name__ == "__main__":
    main()
