"""What the bounds on W cost in a training step of whole models: the step with them, and with scales that are kept.

Both variants train the same model, measured in turns; in the second, every bound returns the number that it returned
the first time, so that all else, the multiplication of the weight included, stays as it is.

    python benchmarks/bound_share.py                      # CPU, a small batch
    python benchmarks/bound_share.py --device cuda        # batch 128, bfloat16 autocast
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from opteq import models
from opteq.operators import norms, together
from opteq.operators.captured import Job, in_one_launch

NAMES = ("opteq-199k", "mopteq-193k", "mopteq-0.48m", "geq-5m")


@contextmanager
def kept_scales() -> Iterator[None]:
    found: dict[object, Tensor] = {}

    def once(*jobs: Job, stream: object = None) -> list[Tensor]:  # noqa: ARG001
        for job in jobs:
            if id(job.inputs[0]) not in found:
                found[id(job.inputs[0])] = in_one_launch(job)[0].detach()
        return [found[id(job.inputs[0])] for job in jobs]

    with mock.patch.object(norms, "in_one_launch", once), mock.patch.object(together, "in_one_launch", once):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=None, help="default: 128 on a GPU, 16 on a CPU")
    parser.add_argument("--repeats", type=int, default=None, help="default: 20 on a GPU, 3 on a CPU")
    parser.add_argument("--models", nargs="*", default=list(NAMES))
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    batch, repeats = options.batch or (128 if on_gpu else 16), options.repeats or (20 if on_gpu else 3)
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, batch {batch}; milliseconds a training step, medians of {repeats}")
    print(f"{'model':>14} {'bounded':>9} {'kept':>9} {'share':>7}")
    for model_name in options.models:
        torch.manual_seed(0)
        model = models.create(model_name).to(device, memory_format=torch.channels_last)
        for _, layer in models.equilibria(model):
            layer.on_failure = "ignore"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
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

        times: dict[str, list[float]] = {"bounded": [], "kept": []}
        for turn in range(repeats + 4):
            spent = step()
            with kept_scales():
                step()  # fills in the scales
                other = step()
            if turn >= 4:  # the first ones warm up
                times["bounded"].append(spent)
                times["kept"].append(other)
        bounded, kept = (1e3 * statistics.median(times[key]) for key in ("bounded", "kept"))
        print(f"{model_name:>14} {bounded:9.2f} {kept:9.2f} {100 * (1 - kept / bounded):6.1f}%", flush=True)


if __name__ == "__main__":
    main()
