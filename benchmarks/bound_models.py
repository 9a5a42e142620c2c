"""All the bounds of a model, values and gradients, by fused kernels and by tensor operations, in turns.

What is timed is what a training step pays for them: one computation for all operators of the model, the scaling of
every weight, and the backward pass from the scaled weights to the parameters. On a GPU everything but the last two is
one CUDA graph. ``--kernels`` lists what runs in it, by time.

    python benchmarks/bound_models.py --device cuda
    python benchmarks/bound_models.py --device cuda --models geq-5m --kernels
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

import opteq
from opteq import models
from opteq.operators import Operator, bounded_together

NAMES = ("opteq-199k", "mopteq-193k", "mopteq-0.48m", "geq-5m")


def bounds(model: torch.nn.Module) -> list[Tensor]:
    parts = [part for part in model.modules() if isinstance(part, Operator) and part.bounded_by()]
    given = [part.bounded_by()[0] for part in parts]
    with bounded_together(model):
        scaled = [vars(part.prepare()).get("weight", given[i]) for i, part in enumerate(parts)]
    return list(torch.autograd.grad(scaled, given, [torch.ones_like(weight) for weight in scaled], allow_unused=True))


def milliseconds(model: torch.nn.Module, device: torch.device, repeats: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(repeats):
        bounds(model)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="*", default=list(NAMES))
    parser.add_argument("--turns", type=int, default=None, help="default: 15 on a GPU, 3 on a CPU")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of the fused path")
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    turns, repeats = options.turns or (15 if on_gpu else 3), 10 if on_gpu else 1
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}; milliseconds for all bounds of a model, medians of {turns} turns")
    print(f"{'model':>14} {'fused':>9} {'plain':>9} {'largest difference':>20}")
    for model_name in options.models:
        torch.manual_seed(0)
        model = models.create(model_name).to(device)
        with torch.no_grad():
            for part in model.modules():
                if isinstance(part, Operator) and (found := part.bounded_by()):
                    found[0].mul_(2)  # above the bound, so that the bound acts
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(turns + 2):
            for fused in (True, False):
                with opteq.fast_paths(fused=fused):
                    spent = milliseconds(model, device, repeats)
                if turn >= 2:  # the first ones capture and warm up
                    times[fused].append(spent)
        fused_ms, plain_ms = (statistics.median(times[key]) for key in (True, False))
        one = bounds(model)
        with opteq.fast_paths(fused=False):
            other = bounds(model)
        apart = max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True) if a is not None)
        print(f"{model_name:>14} {fused_ms:9.3f} {plain_ms:9.3f} {apart:20.1e}", flush=True)
        if options.kernels and on_gpu:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                bounds(model)
                torch.cuda.synchronize()
            print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))


if __name__ == "__main__":
    main()
