"""One of two processes that train a layer together, for test_laws_module.py."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import opteq
from cases import SOLVERS, by_name


def main(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    (case,) = by_name("opteq-relu")
    layer = nn.parallel.DistributedDataParallel(opteq.Equilibrium(case.problem(), SOLVERS["anderson"]))
    share = case.input(4).chunk(2)[rank]
    layer(share).square().mean().backward()
    written = Path(folder) / "gradients.pt"
    if rank == 0:
        torch.save([weight.grad for weight in layer.parameters()], f"{folder}/draft")
        os.replace(f"{folder}/draft", written)
    # A barrier of gloo's, or taking the group down, hangs now and then where the other process is gone already: so
    # neither goes before the gradients are written, and both go at once.
    until = time.monotonic() + 60
    while not written.exists() and time.monotonic() < until:
        time.sleep(0.02)
    sys.stdout.flush()
    os._exit(0 if written.exists() else 1)
