"""What the bounds on W cost in a training step of whole models, measured in two ways within one run.

"share" compares steps with and without: in the second kind every bound returns the number that it returned the first
time, so that all else, the multiplication of the weight included, stays as it is. The two take turns, each first every
other time, and the learning rate is so small that they do the same work. Where bounds are cheap, that is a small
difference of large numbers; its range over all turns is printed beside it. On a CPU, where work is done when it is
called for, "inside" is the time spent in bounds and their gradients during the steps with them, by the clock.

    python benchmarks/bound_share.py                      # CPU: a quarter of an hour on two cores
    python benchmarks/bound_share.py --device cuda        # bfloat16 autocast
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from opteq import models
from opteq.engine.cuda_graphs.bounds import Aside, Job, in_one_launch
from opteq.operators import norms, together

NAMES = ("opteq-199k", "mopteq-193k", "mopteq-0.48m", "geq-5m")


class Attached(torch.autograd.Function):
    """A number whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, slopes: list[Tensor], *inputs: Tensor) -> Tensor:  # noqa: ARG004
        ctx.slopes = slopes
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, *(gradient * slope for slope in ctx.slopes)


class Bounds:
    """Stands in for the computation of bounds: as it is, with a clock, or with the numbers of its first call."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.found: dict[int, Tensor] = {}
        self.kept = False
        self.inside = 0.0

    def __call__(self, *jobs: Job, aside: Aside | None = None) -> list[Tensor]:
        if not self.found.keys() >= {id(job.inputs[0]) for job in jobs}:
            self.found |= {id(job.inputs[0]): in_one_launch(job)[0].detach() for job in jobs}
        if self.kept:
            return [self.found[id(job.inputs[0])] for job in jobs]
        if self.on_gpu:
            return in_one_launch(*jobs, aside=aside)
        begun = time.perf_counter()
        values = [self._with_gradient(job) for job in jobs]
        self.inside += time.perf_counter() - begun
        return values

    @staticmethod
    def _with_gradient(job: Job) -> Tensor:
        leaves = [tensor.detach().requires_grad_() for tensor in job.inputs]
        with torch.enable_grad():
            value = job.function(*leaves)
            slopes = torch.autograd.grad(value, leaves)
        attached: Tensor = Attached.apply(value.detach(), slopes, *job.inputs)  # type: ignore[no-untyped-call]
        return attached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=128, help="default: 128, as in the recipes")
    parser.add_argument("--repeats", type=int, default=None, help="default: 20 on a GPU, 5 on a CPU")
    parser.add_argument("--models", nargs="*", default=list(NAMES))
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    batch, repeats = options.batch, options.repeats or (20 if on_gpu else 5)
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, batch {batch}; milliseconds a training step, medians of {repeats}")
    print(f"{'model':>14} {'bounded':>9} {'kept':>9} {'share':>7}  {'(least, most)':>16} {'inside':>9} {'share':>7}")
    for model_name in options.models:
        torch.manual_seed(0)
        model = models.create(model_name).to(device, memory_format=torch.channels_last)
        for _, layer in models.equilibria(model):
            layer.on_failure = "ignore"
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)
        x = torch.randn(batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(0, 10, (batch,), device=device)

        def step() -> float:
            if on_gpu:
                torch.cuda.synchronize()
            begun = time.perf_counter()
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
                scores = model(x)  # noqa: B023
            F.cross_entropy(scores.float(), labels).backward()  # noqa: B023
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            if on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter() - begun

        bounds = Bounds(on_gpu)
        spent: dict[bool, list[float]] = {True: [], False: []}
        inside = []
        with mock.patch.object(norms, "in_one_launch", bounds), mock.patch.object(together, "in_one_launch", bounds):
            for turn in range(repeats + 4):
                for bounds.kept in (turn % 2 == 0, turn % 2 == 1):
                    bounds.inside = 0.0
                    spent[bounds.kept].append(step())
                    if not bounds.kept:
                        inside.append(bounds.inside)
        # The first turns warm up.
        (bounded, kept), own = ([1e3 * t for t in spent[which][4:]] for which in (False, True)), inside[4:]
        shares = [100 * (1 - without / full) for full, without in zip(bounded, kept, strict=True)]
        middle = statistics.median(bounded)
        text = f"{model_name:>14} {middle:9.2f} {statistics.median(kept):9.2f} {statistics.median(shares):6.1f}%"
        text += f"  {f'({min(shares):.1f}, {max(shares):.1f})':>16}"
        if not on_gpu:
            ours = 1e3 * statistics.median(own)
            text += f" {ours:9.2f} {100 * ours / middle:6.1f}%"
        print(text, flush=True)


if __name__ == "__main__":
    main()
