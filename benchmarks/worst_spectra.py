"""How far above the truth the bounds of eigenvalues and norms can lie: a search for bad spectra, and random kernels.

First table: the eigenvalues of a positive semidefinite matrix are moved by gradient ascent, from many starts, so that
`opteq.operators.spectral.bound.eigenvalue_bound` overestimates the largest one as much as possible. It depends on
the spectrum alone, so the search runs on vectors; the worst one found is handed to the library as a matrix, and the two
must agree. What a search finds is a lower bound of the worst case. Second table: random kernels as they are bounded in
training and by `norm()`, against eigenvalues on a grid of 48 x 48 frequencies (on which a supremum can be missed by at
most 0.43 %).

    python benchmarks/worst_spectra.py         # under two minutes on two cores of a CPU
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from opteq.operators import kernel_norm
from opteq.operators.spectral.bound import eigenvalue_bound

SIZES = (8, 64, 128, 256, 512)
SQUARINGS = (3, 4, 7)
CHANNELS = (32, 64, 128, 256)


def excess(spectra: Tensor, squarings: int) -> Tensor:
    """The relative error of ``sqrt(bound)`` for spectra ``(S, n)`` whose largest entry is 1."""
    n = spectra.shape[1]
    h = spectra.square().sum(1, keepdim=True) / (2 * spectra.sum(1, keepdim=True))
    x = 1 - spectra / h
    scales = []
    for _ in range(squarings):
        scales.append(x.pow(4).mean(1, keepdim=True))
        x = 1 - 2 * x.square() / scales[-1]
    top = (1 + ((n - 1) * (scales.pop() - 1).clamp_min(1e-15)).sqrt()).sqrt()
    for k in reversed(scales):
        top = (k * (1 + top) / 2).sqrt()
    return (h * (1 + top)).sqrt().squeeze(1) - 1


def worst(n: int, squarings: int, starts: int, steps: int) -> Tensor:
    """The worst spectrum found, ``(n,)``."""
    generator = torch.Generator().manual_seed(n + squarings)
    # A few levels with random multiplicities: what bad spectra look like; and some without any order.
    levels = torch.rand(starts, 4, generator=generator, dtype=torch.float64)
    member = torch.rand(starts, n, generator=generator) * torch.rand(starts, 1, generator=generator) * 4
    free = torch.logit(levels.gather(1, member.long()).clamp(0.01, 0.99))
    free[::4] = 2 * torch.randn(free[::4].shape, generator=generator, dtype=torch.float64)
    free.requires_grad_()
    one = torch.ones(starts, 1, dtype=torch.float64)

    def spectra() -> Tensor:
        return torch.cat([one, torch.sigmoid(free[:, 1:])], dim=1)

    ascent = torch.optim.Adam([free], lr=0.1)
    for step in range(steps):
        ascent.param_groups[0]["lr"] = 0.2 * (1 - step / steps) + 1e-3
        ascent.zero_grad()
        free.grad = torch.autograd.grad(-excess(spectra(), squarings).sum(), free)[0]
        ascent.step()
    found = spectra().detach()
    return found[excess(found, squarings).nan_to_num(-1).argmax()]


def grid_norm(kernel: Tensor, points: int = 48) -> float:
    """The largest norm of the symbol on a grid, by LAPACK: a lower bound of the supremum."""
    half = torch.fft.rfft2(kernel, s=(points, points)).permute(2, 3, 0, 1).flatten(0, 1)
    largest = [torch.linalg.eigvalsh(part @ part.mH)[:, -1].max() for part in half.split(64)]
    return float(torch.stack(largest).max().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=48)
    parser.add_argument("--steps", type=int, default=1200)
    options = parser.parse_args()

    print("worst overestimate of sqrt(largest eigenvalue) found, by squarings and size; several largest among the n")
    print("  T " + "".join(f"{f'n = {n}':>18}" for n in SIZES))
    for squarings in SQUARINGS:
        row = []
        for n in SIZES:
            spectrum = worst(n, squarings, options.starts, options.steps)
            value = float(excess(spectrum[None], squarings))
            library = float(eigenvalue_bound(torch.diag(spectrum)[None], squarings, symmetric=True).sqrt()) - 1
            assert abs(value - library) < 1e-6, (value, library)
            row.append(f"{value:9.3%} ({int((spectrum > 0.99).sum()):3d})  ")
        print(f"{squarings:3d} " + "".join(f"{text:>18}" for text in row), flush=True)

    print("random 3 x 3 kernels: overestimate of the norm")
    for channels in CHANNELS:
        kernel = torch.randn(channels, channels, 3, 3, generator=torch.Generator().manual_seed(channels))
        exact = grid_norm(kernel)
        training, fine = (float(kernel_norm(kernel, fine=fine)) / exact - 1 for fine in (False, True))
        print(f"{channels:4d} channels: in training {training:.2%}, norm() {fine:.2%}", flush=True)


if __name__ == "__main__":
    main()
