"""A training step of whole models, beside that of a residual network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from opteq import models
from opteq_bench.cases import MODELS, PICTURE, Precision, pictures
from opteq_bench.timing import Clock

BASELINE = "resnet18-cifar"
# Enough for the weights to move and too little to leave where they began: solves then stay as long as at the start.
_RATE = 1e-3


class TrainingStep:
    """Forward, cross-entropy, backward and a step of SGD, on pictures and labels that stay the same."""

    def __init__(self, name: str, batch: int, precision: Precision) -> None:
        torch.manual_seed(0)
        self.model = models.create(name).to(precision.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_RATE, momentum=0.9)
        self.precision = precision
        self.x: Tensor = pictures(batch, PICTURE, precision.device)
        self.labels = torch.arange(batch, device=precision.device) % 10

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision.autocast():
            loss = F.cross_entropy(self.model(self.x), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def said(self) -> dict[str, Any]:
        """Mean steps and worst residual of every equilibrium in the last step."""
        found: dict[str, Any] = {}
        for name, layer in models.equilibria(self.model):
            assert layer.last is not None
            for way, report in (("forward", layer.last[0]), ("backward", layer.last[1].report)):
                if report is not None:
                    found[f"{name}.{way}"] = {
                        "steps": float(report.steps.float().mean()),
                        "residual": float(report.residual.max()),
                    }
        return found


def measure(batch: int, precision: Precision, clock: Clock) -> dict[str, Any]:
    """Milliseconds a training step, and how many times that of the residual network."""
    steps = {name: TrainingStep(name, batch, precision) for name in (*MODELS, BASELINE)}
    times = clock.in_turns(steps)
    baseline = times[BASELINE]
    figures: dict[str, Any] = {}
    for name, time in times.items():
        if isinstance(time, str):
            figures[name] = {"ms": None, "ratio": None, "fails": time}
            continue
        figures[name] = {
            "ms": time.median,
            "low": time.low,
            "high": time.high,
            "repeats": time.repeats,
            "ratio": None if isinstance(baseline, str) else time.median / baseline.median,
            "fails": None,
            "solves": steps[name].said(),
        }
    return {"precision": precision.name, "batch": batch, "baseline": BASELINE, "figures": figures}
