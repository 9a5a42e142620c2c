"""Which kernels a GPU runs in a step of the map, of plain and Anderson iteration, and in a training step of a layer.

For every shape and precision: wall time with a wait after every call, the time that kernels take, their number, and the
dearest of them, microseconds a step.

    python benchmarks/step_kernels.py 256,256,16:bf16 64,128,32:tf32 geq-5m:bf16
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from opteq_bench import stepping
from opteq_bench.cases import MODELS, Precision, Shape, layer_case, layer_problem, model_case, pictures
from opteq_bench.contenders import ours, shared
from opteq_bench.exact import ExactAnderson, ExactPicard

BATCH, CALLS, SHOWN = 128, 3, 14


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="+", help="CHANNELS,HIDDEN,SIDE:PRECISION, or MODEL:PRECISION for steps alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this tells what a GPU does, and torch sees none here")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda")
    for case in options.case:
        size, _, name = case.partition(":")
        precision = Precision(name, device)
        shape = None if size in MODELS else Shape.parse(size)
        made = model_case(size, BATCH, precision) if shape is None else layer_case(shape, BATCH, precision)
        anderson = ExactAnderson(memory=stepping.MEMORY, max_steps=stepping.STEPS, history="half")
        print(f"== {case}")
        show("map", stepping.captured(made), stepping.STEPS)
        show("plain", stepping.ours(made, ExactPicard(max_steps=stepping.STEPS)), stepping.STEPS)
        show("Anderson", stepping.ours(made, anderson), stepping.STEPS)
        if shape is None:
            continue
        problem = layer_problem(shape, device)
        x = pictures(BATCH, (shape.channels, shape.side, shape.side), device).requires_grad_()
        layer = ours(problem, precision)
        show("training step", lambda layer=layer, x=x: layer.step(x), 1)
        show("bound and input term", lambda p=problem, q=precision, x=x: shared(p, q, x), 1)


def show(label: str, work: Callable[[], object], steps: int) -> None:
    """Print what ``work``, which takes so many steps, costs."""
    wall = milliseconds(work)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(CALLS):
            work()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in profiled.events() or ():
        # Autograd's own nodes, whose names begin so, span the kernels that they launch.
        if event.device_type.name == "CUDA" and not event.name.startswith("_"):
            kernels[event.name].append(event.device_time)
    total = sum(map(sum, kernels.values()))
    count = sum(map(len, kernels.values()))
    print(f"{label}: wall {wall:.3f} ms, kernels {total / CALLS / 1e3:.3f} ms in {count / CALLS:.0f} launches")
    for name, times in sorted(kernels.items(), key=lambda entry: -sum(entry[1]))[:SHOWN]:
        each, often = sum(times) / CALLS / steps, len(times) / CALLS / steps
        print(f"  {each:8.2f} us a step, {often:6.2f} times: {name[:90]}")


def milliseconds(work: Callable[[], object]) -> float:
    """The median of thirty calls, each waited for."""
    times = []
    for call in range(34):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if call >= 4:  # the first ones compile and capture
            times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


if __name__ == "__main__":
    main()
