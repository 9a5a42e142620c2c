"""Forward and backward of a layer beside torchdeq's, and nothing else: `make bench` takes long with large batches.

torchdeq goes back by plain iteration, which `make bench` finds to be its fastest way on most of these layers. Turn by
turn; medians.

    OMP_NUM_THREADS=2 python benchmarks/training_ratio.py --batch 128 --repeats 3
    OMP_NUM_THREADS=1 python benchmarks/training_ratio.py --batch 8 --repeats 7 --cpu-time    # beside other processes
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from opteq_bench import rivals
from opteq_bench.cases import SHAPES, Precision, Shape, layer_problem, random_images
from opteq_bench.contenders import ours, shared, torchdeq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help="CHANNELS,HIDDEN,SIDE; the four of the results by default")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backward", default="fixed_point_iter", help="torchdeq's backward solver")
    parser.add_argument("--cpu-time", action="store_true", help="of the process; it hardly feels other processes")
    options = parser.parse_args()
    if min(options.batch, options.repeats) < 1:
        parser.error(f"--batch and --repeats should be at least 1; got {options.batch} and {options.repeats}")
    if rivals.version() is None:
        parser.error("torchdeq is not installed, so there is nothing to compare with: pip install 'opteq[bench]'")
    if options.backward not in rivals.SOLVERS:
        parser.error(f"--backward should be one of {', '.join(rivals.SOLVERS)}; got {options.backward}")
    device = torch.device("cpu")
    precision = Precision("float32", device)
    print(f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}, batch {options.batch}\n")
    print(
        "| layer | opteq ms | torchdeq ms | times | bound of W and input term, in both, ms | steps, ours | torchdeq's |"
    )
    print("|---|---|---|---|---|---|---|")
    for shape in [Shape.parse(text) for text in options.shapes] or SHAPES:
        problem = layer_problem(shape, device)
        x = random_images(options.batch, (shape.channels, shape.side, shape.side), device).requires_grad_()
        own, other = ours(problem, precision), torchdeq(problem, precision, options.backward)
        works: list[Callable[[], object]] = [
            partial(own.step, x),
            partial(other.step, x),
            partial(shared, problem, precision, x),
        ]
        now = time.process_time if options.cpu_time else time.perf_counter
        times = interleaved_milliseconds(works, options.repeats, now)
        steps = [
            f"{said['forward_steps']:.0f} + {said['backward_steps']:.0f}"
            for said in (own.solver_stats(), other.solver_stats())
        ]
        print(
            f"| {shape} | {times[0]:.0f} | {times[1]:.0f} | {times[1] / times[0]:.2f} | {times[2]:.0f} "
            f"| {steps[0]} | {steps[1]} |",
            flush=True,
        )


def interleaved_milliseconds(
    works: Sequence[Callable[[], object]], repeats: int, now: Callable[[], float]
) -> list[float]:
    """Milliseconds of every work, the median of as many turns after one that does not count."""
    taken: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 1):
        for work, own in zip(works, taken, strict=True):
            begin = now()
            work()
            if turn:
                own.append(1e3 * (now() - begin))
    return [statistics.median(own) for own in taken]


if __name__ == "__main__":
    main()
