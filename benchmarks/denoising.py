"""Seconds of a training step of a denoiser, at the beginning of training: the median of 20 after 20.

    python benchmarks/denoising.py --data DIR [--recipe denoiser-weak] [--plain] [--set KEY=VALUE ...]

DIR holds folders train, set12 and bsd68 of grey images. ``opteq train`` trains denoisers, ``opteq evaluate`` tests.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext

import torch

import opteq
from opteq.training import load_any_recipe
from opteq.training.denoising.trainer import DenoisingTrainer
from opteq.training.devices import make_accelerator
from opteq.training.recipe.denoising import DenoisingRecipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--recipe", default="denoiser-weak")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--plain", action="store_true", help="no captured graphs, no fused kernels")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    recipe = load_any_recipe(options.recipe, [f"data.root={options.data}", *options.set])
    if not isinstance(recipe, DenoisingRecipe):
        raise SystemExit(f"{options.recipe} trains no denoiser")
    accelerator = make_accelerator(recipe.train.device, "no", recipe.train.tf32)
    trainer = DenoisingTrainer(recipe, accelerator)
    with opteq.engine.off() if options.plain else nullcontext():
        spent = [timed(trainer) for _ in range(2 * options.steps)][options.steps :]
    line = trainer.line()
    print(json.dumps({
        "median step in s": round(sorted(spent)[len(spent) // 2], 4), "forward steps": round(line["solver_steps"], 1),
        "backward steps": round(line["gradient_steps"], 1), "batch": recipe.train.batch_size,
        "patch": recipe.train.patch, "device": str(accelerator.device),
    }))  # fmt: skip


def timed(trainer: DenoisingTrainer) -> float:
    """Seconds of one step."""
    began = time.perf_counter()
    trainer.advance()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
