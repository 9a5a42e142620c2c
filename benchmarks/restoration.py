"""A denoiser's prior on tasks that it was not trained for, beside total variation.

    python benchmarks/restoration.py --data DIR --model RUN [--tasks blur mask scale] [--device cuda] [--out FILE.json]

DIR holds folders set12 and bsd68 of grey images. Both methods have their parameters tuned on the images of Set12 that
are 256 pixels wide, per task, for the best mean PSNR: on a coarse grid first, then by moves to better neighbours on
finer grids, also beyond the coarse one. They are then tested on BSD68. Total variation is isotropic and minimised by
the primal-dual method of Chambolle and Pock; the learned prior by ``opteq.FISTA`` until the estimated relative distance
to the minimiser is below ``--tol``. These energies have flat directions: a small residual alone does not mean a
minimum. Twelve pixels at the border do not count: no method knows what lies beyond.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
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
from opteq.models.restoration.minimise import minimise
from opteq.training.denoising.quality import psnr

BORDER = 12
BATCH = 17
FINER = (1.8, 1.35)
"""By which factors parameters are changed after the coarse grid."""


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


TASKS = {
    "blur": Task("Gaussian blur of 1.6 pixels, noise 2.55", lambda _: op.Blur(op.gaussian_kernel(1.6)), 2.55),
    "mask": Task("half of the pixels missing, noise 10", random_mask, 10.0),
    "scale": Task("every second row and column, noise 2.55", lambda _: op.Downsample(2), 2.55),
}

Answer = tuple[Tensor, dict[str, Tensor]]
Method = Callable[[Tensor, Any], Answer]
Values = tuple[float, ...]

GRIDS: dict[str, list[Values]] = {
    "total variation": [(strength,) for strength in (1e-3, 4e-3, 1.6e-2, 6.4e-2)],
    "prior": list(itertools.product((5.0, 12.0, 30.0), (0.003, 0.01, 0.03, 0.1, 0.3))),
}
NAMES = {"total variation": ("strength",), "prior": ("noise level", "strength")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=68, help="test images")
    parser.add_argument("--tuning", type=int, default=7, help="images that parameters are tuned on")
    parser.add_argument("--crop", type=int, help="use the middle of images, so many pixels wide and high")
    parser.add_argument(
        "--tol", type=float, default=1e-4, help="estimated relative distance to the minimiser, in the test"
    )
    parser.add_argument("--tuning-tol", type=float, default=1e-3, help="the same while tuning")
    parser.add_argument("--max-steps", type=int, default=3000, help="of FISTA in the test; a third of it while tuning")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model = Denoiser.load(options.model, on_failure="ignore").to(options.device).eval()
    tuning = [image for image in images(f"{options.data}/set12") if image.shape[-1] == 256][: options.tuning]
    test = images(f"{options.data}/bsd68")[: options.images]
    if options.crop:
        tuning, test = ([middle(image, options.crop) for image in some] for some in (tuning, test))
    rows = []
    for task in (TASKS[name] for name in options.tasks):
        row: dict[str, Any] = {"task": task.name}
        row["measured, adjoint"] = mean(task, test, lambda x, A: (A.adjoint(x), {}), options.device)["psnr"]
        tuned_by = prior_method(model, options.tuning_tol, max(1, options.max_steps // 3), attempts=0)
        tested_by = prior_method(model, options.tol, options.max_steps)
        for name, (rough, exact) in {
            "total variation": (by_total_variation, by_total_variation),
            "prior": (tuned_by, tested_by),
        }.items():

            def score(values: Values, method: Callable[..., Answer] = rough, task: Task = task) -> dict[str, Any]:
                return mean(task, tuning, lambda x, A: method(x, A, *values), options.device)

            best, tried = tuned(score, GRIDS[name], f"{task.name}: {name}")
            began = time.perf_counter()
            found = mean(task, test, lambda x, A, method=exact, values=best: method(x, A, *values), options.device)  # type: ignore[misc]
            parameters = dict(zip(NAMES[name], (float(f"{value:.3g}") for value in best), strict=True))
            seconds = round(time.perf_counter() - began, 1)
            row[name] = {"parameters": parameters, "tried": tried, **found, "seconds of the test": seconds}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.out:  # after every task: what is there is not lost where time runs out
            with open(options.out, "w") as file:
                json.dump(
                    {"model": model.size, "device": options.device, "tol": options.tol, "rows": rows}, file, indent=2
                )


def tuned(score: Callable[[Values], dict[str, Any]], grid: Sequence[Values], title: str) -> tuple[Values, int]:
    """The parameters with the best mean PSNR, and how many were tried."""
    known: dict[Values, float] = {}

    def look(values: Values) -> float:
        key = tuple(float(f"{value:.6g}") for value in values)
        if key not in known:
            began = time.perf_counter()
            found = score(key)
            known[key] = found["psnr"]
            told = ", ".join(f"{name} {value}" for name, value in found.items())
            shown = ", ".join(f"{value:.3g}" for value in key)
            print(f"{title} ({shown}): {told}, {time.perf_counter() - began:.1f} s", flush=True)
        return known[key]

    best = max(grid, key=look)
    for factor in FINER:
        for _ in range(4):  # moves at most
            around = itertools.product(*[(value / factor, value, value * factor) for value in best])
            before, best = best, max([best, *around], key=look)
            if best == before:
                break
    return best, len(known)


def images(folder: str) -> list[Tensor]:
    """Images ``(1, h, w)`` in [0, 1], cropped to even sizes."""
    read = [image.float() / 255 for image in read_grey(folder)]
    return [image[:, : image.shape[1] // 2 * 2, : image.shape[2] // 2 * 2] for image in read]


def middle(image: Tensor, size: int) -> Tensor:
    """The middle ``size`` rows and columns."""
    top, left = (image.shape[1] - size) // 2, (image.shape[2] - size) // 2
    return image[:, top : top + size, left : left + size]


@torch.no_grad()
def mean(task: Task, clean: Sequence[Tensor], method: Method, device: str) -> dict[str, Any]:
    """Mean PSNR over images; where the method tells, how its energies were minimised."""
    total = 0.0
    told: dict[str, list[Tensor]] = {}
    for group in by_shape(clean):
        y = torch.stack(group).to(device)
        A = task.operator(y.shape).to(device).prepare()
        measured = A(y)
        noise = torch.randn(measured.shape, generator=torch.Generator().manual_seed(len(group)))
        answer, details = method(measured + task.noise / 255 * noise.to(device), task.operator(y.shape).to(device))
        inside = (..., slice(BORDER, -BORDER), slice(BORDER, -BORDER))
        total += float(psnr(answer[inside], y[inside]).sum())
        for name, values in details.items():
            told.setdefault(name, []).append(values.double().cpu())
    result: dict[str, Any] = {"psnr": round(total / len(clean), 3)}
    for name, parts in told.items():
        values = torch.cat(parts)
        result[name] = float(f"{float(values.max() if name.startswith('worst') else values.mean()):.3g}")
    return result


def by_shape(images: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of images of one shape."""
    groups: dict[torch.Size, list[Tensor]] = {}
    for image in images:
        groups.setdefault(image.shape, []).append(image)
    for group in groups.values():
        yield from (group[i : i + BATCH] for i in range(0, len(group), BATCH))


def prior_method(model: Denoiser, tol: float, max_steps: int, attempts: int = 3) -> Callable[..., Answer]:
    """The learned prior with a noise level (of 255) and a strength."""

    def method(x: Tensor, A: op.Operator, noise: float, strength: float) -> Answer:
        problem, sigma = Restoration(model.prior, A, strength).to(x.device), x.new_full((len(x),), noise / 255)
        state, report = minimise(problem, x, sigma, tol, max_steps, attempts)
        image = problem((x, sigma)).step(state)
        rest = (image - state).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)
        details = {
            "minimised": report.converged,
            "negative curvature": report.codes == int(opteq.Status.NOT_A_MINIMUM),
            "worst residual": rest,
            "worst estimated error": report.residual,
            "mean steps": report.steps,
            "worst steps": report.steps,
        }
        return state, details

    return method


def by_total_variation(x: Tensor, A: op.Operator, strength: float, steps: int = 1000) -> Answer:
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
    return y, {}


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
