"""Forward and backward of OptEq, built in and written by a user, on a GPU: milliseconds and their ratio.

python benchmarks/written.py
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
        return -0.5 * self.W.adjoint(y).square().flatten(1).sum(1) - (self.U(x) * y).flatten(1).sum(1)

    def features(self, y: Tensor) -> Tensor:
        return self.W.adjoint(y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print("| c, m, side | precision | built in, ms | written, ms | ratio | compiled: built in | written | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for precision in ("tf32", "bf16") if options.device == "cuda" else ("float32",):
        for shape in SHAPES:
            pairs = [
                [layer_milliseconds(shape, precision, kind, compiled, options) for kind in (opteq.OptEq, Written)]
                for compiled in (False, True)
            ]
            cells = " | ".join(f"{one:.2f} | {other:.2f} | {other / one:.2f}" for one, other in pairs)
            print(f"| {shape} | {precision} | {cells} |", flush=True)


def layer_milliseconds(
    shape: tuple[int, int, int], precision: str, kind: type, compiled: bool, options: argparse.Namespace
) -> float:
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

    return median_milliseconds(call, options)


def median_milliseconds(call: Callable[[], None], options: argparse.Namespace) -> float:
    """Milliseconds of a call, the median of three series after a warm-up."""
    series = []
    for _ in range(8 if options.device == "cuda" else 1):
        call()
    for _ in range(3):
        if options.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(options.calls):
            call()
        if options.device == "cuda":
            torch.cuda.synchronize()
        series.append((time.perf_counter() - began) / options.calls * 1e3)
    return statistics.median(series)


if __name__ == "__main__":
    main()
