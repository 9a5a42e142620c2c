"""How much patches weigh in a trained GEQ, with its own gamma and with the automatic one.

For 250 test images and every branch: the least ``|q|^2`` of a sample's patches beside the median, at the zero state,
and the mean weight ``exp(-gamma |q|^2)`` with the model's gamma and with 0.2 / M of each sample.

    python benchmarks/patch_weights.py runs/cifar10-jpeg-geq-5m-pyramid --root DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from opteq import data, models
from opteq.data import Batches
from opteq.kernels.gaussian import GaussianSimilarity, automatic_gamma, squares
from opteq.problems.branches.parallel import BoundParallel
from opteq.problems.geq import BoundGEQ
from opteq.training import load_recipe


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--root", required=True, help="where the images are")
    options = parser.parse_args()
    recipe = load_recipe(str(options.run / "recipe.toml"), [])
    model = models.from_pretrained(options.run)
    dataset = data.load(recipe.data.name, root=options.root, image_size=recipe.data.image_size)
    images, _ = next(iter(Batches(dataset.test, dataset.mean, dataset.std, 250, device="cpu").epoch(0)))
    (_, layer), *_ = models.equilibria(model)
    hidden = layer.problem(model.stem(images))
    print("branch  patches  least / median  mean weight  with 0.2 / M  least of a sample")
    for index, part in enumerate(hidden.parts if isinstance(hidden, BoundParallel) else [hidden]):
        if not isinstance(part, BoundGEQ) or not isinstance(part.similarity, GaussianSimilarity):
            raise SystemExit("this model has a branch without a Gaussian kernel")
        similarity = part.similarity
        sizes = squares(similarity.view(similarity.c)).flatten(1)
        automatic = automatic_gamma(similarity.view, similarity.c).reshape(-1, 1)
        own, other = torch.exp(-similarity.gamma * sizes), torch.exp(-automatic * sizes)
        shares = sizes.amin(dim=1) / sizes.median(dim=1).values
        print(
            f"{index:6} {sizes.shape[1]:8} {float(shares.median()):15.3f} {float(own.mean()):12.3f} "
            f"{float(other.mean()):13.3f} {float(other.mean(dim=1).min()):18.3f}"
        )


if __name__ == "__main__":
    main()
