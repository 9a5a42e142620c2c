"""One training step of an OptEq layer, with its bound and without, and against torchdeq where it is installed.

Twenty Anderson steps forward and at most twenty conjugate-gradient steps backward; times are medians over repeats, the
variants measured in turns so that a change of clock meets all of them.

    python benchmarks/layer_step.py                  # CPU, a small batch
    python benchmarks/layer_step.py --device cuda    # batch 128
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import opteq
from opteq import operators as op

# Channels of the features and of the state, side of the picture; kernels are 3 x 3.
SHAPES = [(32, 64, 32), (64, 128, 32), (256, 256, 16), (256, 256, 8)]
STEPS = 20


def layer(channels: int, hidden: int, bound: float | None, device: torch.device) -> opteq.Equilibrium:
    torch.manual_seed(0)
    W = op.Conv2d(channels, hidden, 3, bound=bound)
    problem = opteq.OptEq(W, U=nn.Conv2d(channels, hidden, 3, padding=1))
    solver = opteq.Anderson(tol=1e-30, max_steps=STEPS)
    gradient = opteq.Implicit(linear=opteq.CG(tol=1e-30, max_steps=STEPS))
    return opteq.Equilibrium(problem, solver, gradient, on_failure="ignore").to(
        device, memory_format=torch.channels_last
    )


def rival(channels: int, hidden: int, device: torch.device) -> Callable[[Tensor], Tensor] | None:
    """The same map in torchdeq, Anderson both ways."""
    try:
        from torchdeq import get_deq
    except ImportError:
        return None
    inner = layer(channels, hidden, None, device)
    deq = get_deq(
        core="sliced",
        ift=True,
        f_solver="anderson",
        b_solver="anderson",
        f_max_iter=STEPS,
        b_max_iter=STEPS,
        f_tol=1e-30,
        b_tol=1e-30,
    )

    def forward(x: Tensor) -> Tensor:
        hidden_problem = inner.problem(x)
        states, _ = deq(hidden_problem.step, hidden_problem.start())
        return hidden_problem.features(states[-1])

    return forward


def seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=None, help="default: 128 on a GPU, 2 on a CPU")
    parser.add_argument("--repeats", type=int, default=None, help="default: 10 on a GPU, 3 on a CPU")
    parser.add_argument("--bf16", action="store_true", help="run under bfloat16 autocast")
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    batch = options.batch or (128 if on_gpu else 2)
    repeats = options.repeats or (10 if on_gpu else 3)
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, batch {batch}, bf16={options.bf16}; milliseconds a training step")
    print(f"{'shape':>16} {'bound':>8} {'no bound':>8} {'share':>7} {'torchdeq':>8}")
    for channels, hidden, side in SHAPES:
        x = torch.randn(batch, channels, side, side, device=device).contiguous(memory_format=torch.channels_last)
        works: dict[str, Callable[[Tensor], Tensor] | None] = {
            "bound": layer(channels, hidden, 0.95, device),
            "no bound": layer(channels, hidden, None, device),
            "torchdeq": rival(channels, hidden, device),
        }
        medians: dict[str, float] = {}
        times: dict[str, list[float]] = {key: [] for key in works}
        for turn in range(repeats + 2):
            for key, model in works.items():
                if model is None:
                    continue

                def step(model: Callable[[Tensor], Tensor] = model, x: Tensor = x) -> None:
                    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.bf16):
                        features = model(x)
                    features.float().square().mean().backward()

                spent = seconds(step, device)
                if turn >= 2:  # the first two warm up
                    times[key].append(spent)
        medians = {key: 1e3 * statistics.median(values) for key, values in times.items() if values}
        share = 1 - medians["no bound"] / medians["bound"]
        rival_time = f"{medians['torchdeq']:8.1f}" if "torchdeq" in medians else "       -"
        shape = f"{channels},{hidden},{side}"
        print(f"{shape:>16} {medians['bound']:8.1f} {medians['no bound']:8.1f} {100 * share:6.1f}% {rival_time}")


if __name__ == "__main__":
    main()
