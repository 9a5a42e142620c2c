"""How long a GPU takes to square the matrices of a bound, for several ways to cut them into programs.

Microseconds a launch in a CUDA graph, for the sweep over frequencies in half precision and for the few that are
computed again in float32.

    python benchmarks/bound_kernels.py 64 128 256
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
from opteq.operators.half import Tiling

from opteq.operators import squaring_kernels as kernels

FREQUENCIES, CANDIDATES, SQUARINGS, TURNS = 74, 4, 4, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", nargs="+", type=int, help="rows of a matrix")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this times a GPU, and torch sees none here")
    for n in options.side:
        for batch, storage, precision, tiles in (
            (FREQUENCIES, torch.float16, "ieee", (64, 128)),
            (CANDIDATES, torch.float32, "tf32x3", (32, 64)),
        ):
            for tile, depth, stages, warps in itertools.product(tiles, (32, 64), (2, 3, 4), (4, 8)):
                if tile > max(n, 32):
                    continue
                label = (
                    f"n {n}, {batch} of {str(storage)[6:]}: tile {tile}, depth {depth}, stages {stages}, warps {warps}"
                )
                try:
                    took = microseconds(squarings(n, batch, storage, precision, tile, depth, stages, warps))
                except Exception as error:  # too much shared memory, for one
                    print(f"{label}: {type(error).__name__}", flush=True)
                    continue
                print(f"{label}: {took / SQUARINGS:.1f} us", flush=True)


def squarings(
    n: int, batch: int, storage: torch.dtype, precision: str, tile: int, depth: int, stages: int, warps: int
) -> Callable[[], None]:
    """Some squarings one after the other, as a bound has them."""
    tiling, device = Tiling(n, tile), torch.device("cuda")
    pairs = tiling.pairs
    form = torch.randn(batch, n, n, device=device) / n**0.5
    form = form @ form.mT
    length = torch.full((1,), float(n) ** 0.5, device=device)
    powers = torch.empty(SQUARINGS + 1, 2, batch, n, n, dtype=storage, device=device)
    sums = torch.empty(SQUARINGS + 1, batch, 3, pairs, device=device)
    shape = {"REAL": False, "TILE": tile, "num_warps": warps}
    kernels.begin[(pairs, batch)](form, form, length, *powers[0], sums[0], n, batch, pairs, PICKED=False, **shape)

    def work() -> None:
        for step in range(SQUARINGS):
            kernels.square[(pairs, batch)](
                *powers[step], *powers[step + 1], sums[step], sums[step + 1], n, pairs, FIRST=step == 0, STORE=True,
                PRECISION=precision, PARTS=tiling.padded, K=depth, num_stages=stages, **shape,
            )  # fmt: skip

    return work


def microseconds(work: Callable[[], None]) -> float:
    """The median of a few replays."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            work()
    times = []
    for _ in range(TURNS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(1e3 * begun.elapsed_time(ended) / 20)
    return statistics.median(times)


if __name__ == "__main__":
    main()
