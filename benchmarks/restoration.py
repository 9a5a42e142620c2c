"""A denoiser's prior on tasks that it was not trained for, beside total variation.

    python benchmarks/restoration.py --data DIR --model RUN [--device cuda] [--images N] [--out FILE.json]

DIR holds folders set12 and bsd68 of grey images. Both methods have their parameters tuned on the images of Set12 that
are 256 pixels wide, per task, for the best mean PSNR, and are then tested on BSD68. Total variation is isotropic and
minimised by the primal-dual method of Chambolle and Pock; the learned prior by ``opteq.FISTA``. Twelve pixels at the
border do not count: no method knows what lies beyond.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import opteq
from opteq import operators as op
from opteq.data.grey import read_grey
from opteq.models.denoiser import Denoiser
from opteq.models.restoration import Restoration
from opteq.training.denoising.quality import psnr

BORDER = 12
BATCH = 17


@dataclass(frozen=True)
class Task:
    """A measurement operator for an image shape, and the noise (of 255) that is added to measurements."""

    name: str
    operator: Callable[[torch.Size], op.Operator]
    noise: float


def random_mask(shape: torch.Size, share: float = 0.5) -> op.Operator:
    """A random half of the pixels, the same for all images of a shape."""
    drawn = torch.rand(shape[-2:], generator=torch.Generator().manual_seed(0))
    return op.Mask((drawn < share).float())


TASKS = (
    Task("Gaussian blur of 1.6 pixels, noise 2.55", lambda _: op.Blur(op.gaussian_kernel(1.6)), 2.55),
    Task("half of the pixels missing, noise 10", random_mask, 10.0),
    Task("every second row and column, noise 2.55", lambda _: op.Downsample(2), 2.55),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=68, help="test images")
    parser.add_argument("--tuning", type=int, default=7, help="images that parameters are tuned on")
    parser.add_argument("--tol", type=float, default=1e-5)
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model = Denoiser.load(options.model, on_failure="ignore").to(options.device).eval()
    tuning = [image for image in images(f"{options.data}/set12") if image.shape[-1] == 256][: options.tuning]
    test = images(f"{options.data}/bsd68")[: options.images]
    rows = []
    for task in TASKS:
        row: dict[str, Any] = {"task": task.name}
        methods = {"total variation": by_total_variation, "prior": prior_method(model, options.tol)}
        grids = {
            "total variation": [(s * 1e-3,) for s in (0.5, 1, 2, 4, 8, 16, 32, 64)],
            "prior": list(itertools.product((5 / 255, 10 / 255, 15 / 255, 25 / 255), (0.03, 0.1, 0.3, 1.0))),
        }
        row["measured, adjoint"] = mean(task, test, lambda x, A: (A.adjoint(x), None), options.device)["psnr"]
        for name, method in methods.items():
            best = max(
                grids[name], key=lambda values: mean(task, tuning, bound(method, values), options.device)["psnr"]
            )
            row[name] = {"parameters": best, **mean(task, test, bound(method, best), options.device)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"model": model.size, "device": options.device, "rows": rows}, file, indent=2)


Method = Callable[[Tensor, Any], tuple[Tensor, Tensor | None]]


def bound(method: Callable[..., tuple[Tensor, Tensor | None]], values: Sequence[float]) -> Method:
    """The method with its parameters."""
    return lambda x, A: method(x, A, *values)


def images(folder: str) -> list[Tensor]:
    """Images ``(1, h, w)`` in [0, 1], cropped to even sizes."""
    read = [image.float() / 255 for image in read_grey(folder)]
    return [image[:, : image.shape[1] // 2 * 2, : image.shape[2] // 2 * 2] for image in read]


@torch.no_grad()
def mean(task: Task, clean: Sequence[Tensor], method: Method, device: str) -> dict[str, Any]:
    """Mean PSNR over images, and the share of them whose energy was minimised."""
    total, done, known = 0.0, 0.0, False
    for group in by_shape(clean):
        y = torch.stack(group).to(device)
        A = task.operator(y.shape).to(device).prepare()
        measured = A(y)
        noise = torch.randn(measured.shape, generator=torch.Generator().manual_seed(len(group)))
        answer, converged = method(measured + task.noise / 255 * noise.to(device), task.operator(y.shape).to(device))
        inside = (..., slice(BORDER, -BORDER), slice(BORDER, -BORDER))
        total += float(psnr(answer[inside], y[inside]).sum())
        if converged is not None:
            known, done = True, done + float(converged.sum())
    result: dict[str, Any] = {"psnr": round(total / len(clean), 3)}
    return result | ({"minimised": round(done / len(clean), 3)} if known else {})


def by_shape(images: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of images of one shape."""
    groups: dict[torch.Size, list[Tensor]] = {}
    for image in images:
        groups.setdefault(image.shape, []).append(image)
    for group in groups.values():
        yield from (group[i : i + BATCH] for i in range(0, len(group), BATCH))


def prior_method(model: Denoiser, tol: float) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The learned prior with a noise level and a strength."""

    def method(x: Tensor, A: op.Operator, sigma: float, strength: float) -> tuple[Tensor, Tensor | None]:
        layer = opteq.Equilibrium(Restoration(model.prior, A, strength), opteq.FISTA(tol=tol, max_steps=2000))
        layer.on_failure = "ignore"
        solution = layer.to(x.device).solve((x, x.new_full((len(x),), sigma)))
        assert isinstance(solution.state, Tensor)
        return solution.state, solution.converged

    return method


def by_total_variation(x: Tensor, A: op.Operator, strength: float, steps: int = 1000) -> tuple[Tensor, None]:
    """``argmin 1/2 |A y - x|^2 + strength sum |grad y|`` by the primal-dual method with both terms in the dual."""
    A_map, norm = A.prepare(), float(A.norm())
    y = A_map.adjoint(x)
    leading, dual, slopes = y.clone(), torch.zeros_like(x), torch.zeros_like(differences(y))
    tau = sigma = 0.99 / (norm**2 + 8) ** 0.5
    for _ in range(steps):
        dual = (dual + sigma * (A_map(leading) - x)) / (1 + sigma)
        slopes = slopes + sigma * differences(leading)
        slopes = slopes / (slopes.norm(dim=0) / strength).clamp_min(1)
        new = y - tau * (A_map.adjoint(dual) + differences_adjoint(slopes))
        y, leading = new, 2 * new - y
    return y, None


def differences(y: Tensor) -> Tensor:
    """Forward differences along rows and columns, ``(2, B, 1, h, w)``; zero at the far edges."""
    down = F.pad(y[..., 1:, :] - y[..., :-1, :], (0, 0, 0, 1))
    right = F.pad(y[..., 1:] - y[..., :-1], (0, 1))
    return torch.stack([down, right])


def differences_adjoint(slopes: Tensor) -> Tensor:
    """The adjoint of :func:`differences`."""
    down, right = slopes[0][..., :-1, :], slopes[1][..., :-1]
    return F.pad(down, (0, 0, 1, 0)) - F.pad(down, (0, 0, 0, 1)) + F.pad(right, (1, 0)) - F.pad(right, (0, 1))


if __name__ == "__main__":
    main()
