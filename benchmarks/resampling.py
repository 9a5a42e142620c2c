"""Averaging channels-last images over squares of pixels, and spreading them back: our kernels beside torch's.

Fifty calls in one CUDA graph, so that launches do not count; microseconds a call.

    python benchmarks/resampling.py
"""

from __future__ import annotations

import torch

import opteq
from opteq.operators import resample

BATCH, CALLS = 128, 50


def microseconds(v: torch.Tensor, side: int, fused: bool) -> float:
    with opteq.fast_paths(fused=fused):
        for _ in range(3):
            resample(v, side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                resample(v, side)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / CALLS


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("these kernels are for a GPU, and torch sees none here")
    print("| dtype | channels | sides | pool us | torch us | spread us | torch us |\n|---|---|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        for channels in (64, 128):
            for fine, coarse in ((32, 16), (32, 8), (32, 4), (16, 8), (8, 4)):
                row = []
                for start, end in ((fine, coarse), (coarse, fine)):
                    v = torch.randn(BATCH, channels, start, start, device="cuda", dtype=dtype)
                    v = v.contiguous(memory_format=torch.channels_last)
                    row += [microseconds(v, end, fused) for fused in (True, False)]
                numbers = " | ".join(f"{number:.1f}" for number in row)
                print(
                    f"| {str(dtype).removeprefix('torch.')} | {channels} | {fine}, {coarse} | {numbers} |", flush=True
                )


if __name__ == "__main__":
    main()
