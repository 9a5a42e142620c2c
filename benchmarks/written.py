"""Forward and backward of OptEq, built in and written by a user: milliseconds and their ratio, turn by turn.

python benchmarks/written.py
OMP_NUM_THREADS=2 python benchmarks/written.py 32,64,32 --device cpu --batch 8 --calls 3
OMP_NUM_THREADS=1 python benchmarks/written.py --device cpu --batch 8 --calls 3 --cpu-time     # beside other processes
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

SHAPES = ((32, 64, 32), (64, 128, 32), (256, 256, 16))


class Written(opteq.HiddenProblem):
    """OptEq as a user would write it."""

    penalty = "relu"

    def __init__(self, W: op.Conv2d, U: nn.Module) -> None:
        super().__init__()
        self.W, self.U = W, U

    def start(self, x: Tensor) -> Tensor:
        return torch.zeros_like(self.U(x).detach())

    def smooth(self, y: Tensor, x: Tensor) -> Tensor:
        injected: Tensor = self.U(x)
        return -0.5 * self.W.adjoint(y).square().flatten(1).sum(1) - (injected * y).flatten(1).sum(1)

    def features(self, y: Tensor) -> Tensor:
        return self.W.adjoint(y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", type=read_shape, help="C,M,SIDE; the three of the results by default")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--cpu-time", action="store_true", help="of the process; it hardly feels other processes")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    on_gpu = options.device == "cuda"  # where functions can be compiled
    print(
        "| c, m, side | precision | built in, ms | written, ms | ratio |" + on_gpu * " written and compiled | ratio |"
    )
    print("|---|---|---|---|---|" + on_gpu * "---|---|")
    for precision in ("tf32", "bf16") if on_gpu else ("float32",):
        for shape in options.shapes or SHAPES:
            kinds = ((opteq.OptEq, False), (Written, False), *on_gpu * ((Written, True),))
            steps = [training_step(shape, precision, kind, compiled, options) for kind, compiled in kinds]
            built_in, *written = median_milliseconds(steps, options)
            cells = " | ".join(f"{taken:.2f} | {taken / built_in:.2f}" for taken in written)
            print(f"| {shape} | {precision} | {built_in:.2f} | {cells} |", flush=True)


def read_shape(text: str) -> tuple[int, ...]:
    """``C,M,SIDE`` as numbers."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"a shape is three positive numbers such as 32,64,32; got {text}")
    return tuple(map(int, parts))


def training_step(
    shape: tuple[int, ...], precision: str, kind: type, compiled: bool, options: argparse.Namespace
) -> Callable[[], None]:
    """Forward and backward of one layer."""
    c, m, side = shape
    torch.manual_seed(0)
    W, U = op.Conv2d(c, m, 3, bound=0.95), nn.Conv2d(c, m, 3, padding=1)
    problem = kind(W, U).to(options.device, memory_format=torch.channels_last)
    layer = opteq.Equilibrium(problem, compile=compiled)
    size = (options.batch, c, side, side)
    x, gradient = (torch.randn(size).to(options.device).contiguous(memory_format=torch.channels_last) for _ in range(2))
    x.requires_grad_()

    def call() -> None:
        with torch.autocast(options.device, torch.bfloat16, enabled=precision == "bf16"):
            z = layer(x)
        z.backward(gradient.to(z.dtype))
        x.grad = None
        problem.zero_grad(set_to_none=True)

    return call


def median_milliseconds(calls: list[Callable[[], None]], options: argparse.Namespace) -> list[float]:
    """Milliseconds of every call, the median of several series in turn after a warm-up."""
    on_gpu = options.device == "cuda"
    now = time.process_time if options.cpu_time else time.perf_counter
    series: list[list[float]] = [[] for _ in calls]
    for call in calls:
        for _ in range(8 if on_gpu else 4):
            call()
    for _ in range(3 if on_gpu else 9):
        for call, taken in zip(calls, series, strict=True):
            if on_gpu:
                torch.cuda.synchronize()
            began = now()
            for _ in range(options.calls):
                call()
            if on_gpu:
                torch.cuda.synchronize()
            taken.append((now() - began) / options.calls * 1e3)
    return [statistics.median(taken) for taken in series]


if __name__ == "__main__":
    main()
