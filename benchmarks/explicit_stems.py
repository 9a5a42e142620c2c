"""What stems are worth without an equilibrium: explicit networks of a given size, trained alike, beside ResNet-18.

A network is a ``Pyramid`` whose levels are averaged, concatenated and read by one linear layer; ``resnet18`` is the
baseline. Training is that of the recipes named cifar10-jpeg: batches of 128, crop and flip,
SGD with Nesterov momentum, weight decay 5e-4, one cycle that peaks at 0.1 after 30 % of the steps, bf16 autocast.
The forward and backward pass of a step are one CUDA graph.

    python benchmarks/explicit_stems.py --root DIR --epochs 10 resnet18 64,64,64,96:1 32,48,64,56:2 32,48,64:3
    python benchmarks/explicit_stems.py --root DIR --epochs 10 64,64,64,96:1:attention
    python benchmarks/explicit_stems.py --root DIR --epochs 10 40,64,80,88:1,2,3,2:inverted
    python benchmarks/explicit_stems.py --root DIR --epochs 10 80,160,256,224:2:basic,basic,basic,inverted
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import opteq.data
from opteq import models
from opteq.models.blocks.pyramid import Pyramid

BATCH, START, PEAK, RISE, DECAY, PADDING = 128, 0.004, 0.1, 0.3, 5e-4, 4
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)


class Explicit(nn.Module):
    """A pyramid and a linear layer on the averages of all its levels."""

    def __init__(self, widths: list[int], depth: int | list[int], attention: bool, block: str | list[str]) -> None:
        super().__init__()
        self.stem = Pyramid(3, widths, depth, levels=range(len(widths)), attention=attention, block=block)
        self.head = nn.Linear(sum(widths), 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.cat([level.mean((2, 3)) for level in self.stem(x)], dim=1))
        return scores


def make(name: str) -> nn.Module:
    if name == "resnet18":
        return models.create("resnet18-cifar")
    widths, depth, *more = name.split(":")
    attention = "attention" in more
    kinds = next((part.split(",") for part in more if part != "attention"), ["basic"])
    depths = [int(count) for count in depth.split(",")]
    return Explicit(
        [int(width) for width in widths.split(",")],
        depths[0] if len(depths) == 1 else depths,
        attention,
        kinds[0] if len(kinds) == 1 else kinds,
    )


class Images:
    """The data set on the device, normalised, with random crops and flips by index."""

    def __init__(self, root: str, device: torch.device) -> None:
        found = opteq.data.load("folder", root=root)
        mean, deviation = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, DEVIATION))
        train, self.test = (
            ((part.images.to(device).float() / 255 - mean) / deviation).bfloat16() for part in (found.train, found.test)
        )
        self.labels, self.test_labels = found.train.labels.long().to(device), found.test.labels.long().to(device)
        self.padded = F.pad(train, (PADDING,) * 4)
        self.side = torch.arange(train.shape[2], device=device)
        self.count, self.device = len(train), device

    def epoch(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """For every batch: which images, and where each is cut out, mirrored or not."""
        order = torch.randperm(self.count, device=self.device)
        corner = torch.randint(0, 2 * PADDING + 1, (self.count, 2), device=self.device)
        mirrored = torch.rand(self.count, device=self.device) < 0.5
        rows, columns = corner[:, :1] + self.side, corner[:, 1:] + self.side
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        whole = order[: self.count // BATCH * BATCH].split(BATCH)
        return [(chosen, rows[chosen], columns[chosen], self.labels[chosen]) for chosen in whole]

    def cut(self, chosen: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return self.padded[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def rate(share: float) -> float:
    """The learning rate after this share of all steps."""
    if share < RISE:
        return START + (PEAK - START) * (1 - math.cos(math.pi * share / RISE)) / 2
    return PEAK * (1 + math.cos(math.pi * (share - RISE) / (1 - RISE))) / 2


def captured(step: Callable[[], None], net: nn.Module) -> Callable[[], None]:
    """``step`` as a CUDA graph; on a CPU as it is. Statistics that warming up has changed are put back."""
    if not torch.cuda.is_available():
        return step
    before = {name: value.clone() for name, value in net.state_dict().items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            net.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    net.zero_grad(set_to_none=True)  # so that the graph writes gradients in place of adding to them
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    net.load_state_dict(before)
    return graph.replay


def train(name: str, epochs: int, images: Images) -> None:
    torch.manual_seed(0)
    device = images.device
    net = make(name).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=START, momentum=0.9, nesterov=True, weight_decay=DECAY)
    side = len(images.side)
    x = torch.zeros(BATCH, 3, side, side, device=device, dtype=torch.bfloat16)
    x, y = x.contiguous(memory_format=torch.channels_last), torch.zeros(BATCH, dtype=torch.long, device=device)

    def scores(given: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            made: Tensor = net(given).float()
        return made

    step = captured(lambda: F.cross_entropy(scores(x), y).backward(), net)
    begun, taken = time.time(), 0
    for epoch in range(epochs):
        net.train()
        batches = images.epoch()
        for *where, labels in batches:
            x.copy_(images.cut(*where))
            y.copy_(labels)
            if device.type == "cpu":
                optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = rate(taken / (epochs * len(batches)))
            step()
            optimizer.step()
            taken += 1
        net.eval()
        with torch.no_grad():
            answers = torch.cat([scores(part).argmax(1) for part in images.test.split(1000)])
        accuracy = (answers == images.test_labels).float().mean().item()
        parameters = sum(weight.numel() for weight in net.parameters())
        print(
            f"{name:>28} {parameters:>10,} parameters  epoch {epoch + 1}/{epochs}  test {100 * accuracy:.2f} %  "
            f"{(time.time() - begun) / (epoch + 1):.1f} s per epoch",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", help="resnet18, or WIDTHS:DEPTH, then :attention and :BLOCKS")
    parser.add_argument("--root", required=True, help="the folder with train/<class> and test/<class>")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    images = Images(options.root, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for name in options.networks:
        train(name, options.epochs, images)


if __name__ == "__main__":
    main()
