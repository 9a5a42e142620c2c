"""What the equilibrium of a trained model adds to its first step.

The state that the input alone gives, ``sigma(U x + b)``, is what a network without feedback would have. Test accuracy
of a trained run with that state in the equilibrium's place, how far the equilibrium is from it, and the norm of every W
beside its bound, at frequency zero and at the median one of 16 x 16 frequencies.

    python benchmarks/feedback.py runs/cifar10-jpeg-popteq-193k-pyramid --root DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from opteq import data, models
from opteq.data import Batches
from opteq.operators import Operator
from opteq.states import State, blocks, map_state
from opteq.training import load_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--root", required=True, help="where the images are")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    recipe = load_recipe(str(options.run / "recipe.toml"), [])
    model = models.from_pretrained(options.run).to(options.device)
    (_, layer), *more = models.equilibria(model)
    if more:
        raise SystemExit("this model has several equilibria")
    dataset = data.load(recipe.data.name, root=options.root, image_size=recipe.data.image_size)
    batches = Batches(dataset.test, dataset.mean, dataset.std, 250, device=options.device)
    right = {"equilibrium": 0, "first step": 0}
    distance, count = 0.0, 0
    with torch.no_grad():
        for images, labels in batches.epoch(0):
            x = model.stem(images)
            hidden = layer.problem(x)
            first = hidden.step(map_state(torch.zeros_like, hidden.start()))
            found = layer.solve(x).state
            for name, state in (("equilibrium", found), ("first step", first)):
                scores = model.head(hidden.features(state))
                right[name] += int((scores.argmax(dim=1) == labels).sum())
            distance += float((norms(found, first) / norms(found)).sum())
            count += len(labels)
    for name, number in right.items():
        print(f"{name:>12}: {100 * number / count:.2f} % of {count} test images")
    for name, part in model.named_modules():
        if isinstance(part, Operator) and part.bound is not None:
            print(f"{name}: norm {float(part.norm()):.3f}, bound {part.bound:g}{frequencies(part)}")
    print(f"the equilibrium differs from the first step by {100 * distance / count:.1f} % of its norm, on average")


def frequencies(part: Operator) -> str:
    """The norms of a convolution at frequency zero, where it acts on means, and at the median frequency."""
    weight = vars(part.prepare()).get("weight")
    if weight is None or weight.ndim != 4 or weight.shape[-1] == 1:
        return ""
    symbols = torch.fft.fft2(weight.detach().double(), s=(16, 16)).permute(2, 3, 0, 1)
    largest = torch.linalg.matrix_norm(symbols, ord=2)
    return f"; {float(largest[0, 0]):.3f} at frequency zero, {float(largest.median()):.3f} at the median one"


def norms(state: State, other: State | None = None) -> torch.Tensor:
    parts = blocks(state) if other is None else [a - b for a, b in zip(blocks(state), blocks(other), strict=True)]
    return torch.stack([part.flatten(1).square().sum(dim=1) for part in parts]).sum(dim=0).sqrt()


if __name__ == "__main__":
    main()
