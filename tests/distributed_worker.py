"""One of two processes that train a layer together; run by test_laws_module.py as ``RANK FOLDER``."""

from __future__ import annotations

import os
import sys

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
    if rank == 0:
        torch.save([weight.grad for weight in layer.parameters()], f"{folder}/gradients.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
