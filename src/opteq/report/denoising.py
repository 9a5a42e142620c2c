"""The report of a denoiser: what it minimises, how well it denoises, and images before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opteq.common.errors import UserError
from opteq.common.files import plain_errors, write_atomically
from opteq.data.grey import read_grey
from opteq.models.denoiser import Denoiser
from opteq.report.charts.curves import Chart, Series, line_chart
from opteq.report.charts.images import WIDE, image_data_url
from opteq.report.frame import html_page
from opteq.report.html.markup import Html, join, tag
from opteq.report.run import Run, read_run
from opteq.solvers import FISTA

_SHOWN = 3
"""Images of the first test set that the page shows."""


def write_denoising_report(folder: Path) -> Path:
    """Write ``report.html`` into the run folder of a denoiser and return its path."""
    run = read_run(folder)
    parts = [_curves(run)]
    notes = list(run.notes)
    if (folder / "config.json").is_file():
        model = Denoiser.load(folder, FISTA(tol=1e-4, max_steps=400), on_failure="ignore").eval()
        parts = [_energy(model), _tests(folder), _images(run, model, notes), *parts]
    else:
        notes.append("The run is not finished: there are no weights yet.")
    remarks = join(*(tag("p", note, class_="note") for note in notes)) if notes else None
    subtitle = tag("p", str(run.recipe.get("reproduces", "")))
    page = html_page(run.name, "Denoiser", subtitle, None, remarks, join(*parts))
    target = folder / "report.html"
    with plain_errors("writing the report"):
        write_atomically(target, page.encode())
    return target


def _section(title: str, *content: object) -> Html:
    return tag("section", tag("h2", title), *content)


def _energy(model: Denoiser) -> Html:
    words = "The output minimises ½|y − x|² + R(y): close to the noisy image x, smooth where the prior R asks for it."
    if model.config.steps:
        words = f"{model.config.steps} plain steps towards the minimum of ½|y − x|² + R(y), from the noisy image x."
    lines = str(model.layer.problem.certificate())
    return _section("What is minimised", tag("p", f"{words} {model.size:,} parameters."), tag("pre", lines))


def _tests(folder: Path) -> Html | None:
    try:
        sets: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())["sets"]
        rows = [
            (
                name, sigma, f"{one['noisy_psnr']:.2f}", f"{one['psnr']:.2f}", f"{one['ssim']:.4f}",
                f"{one['converged']:.0%}",
            )
            for name, levels in sets.items()
            for sigma, one in levels.items()
        ]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, or of another version
        return _section("Tests", tag("p", "Not evaluated yet: `opteq evaluate RUN` writes PSNR and SSIM here."))
    head = ("images", "sigma", "noisy, dB", "PSNR, dB", "SSIM", "minimised")
    body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    return _section("Tests", tag("table", tag("tr", *(tag("th", name) for name in head)), *body))


@torch.no_grad()
def _images(run: Run, model: Denoiser, notes: list[str]) -> Html | None:
    sets, root = run.section("test").get("sets"), run.section("data").get("root")
    try:
        images = read_grey(Path(str(root)) / str(sets[0] if isinstance(sets, list) and sets else "set12"))[:_SHOWN]
    except UserError as error:
        notes.append(f"No images are shown: {error}")
        return None
    figures, sigma = [], model.config.usual_sigma
    for number, image in enumerate(images):
        clean = image[None].float() / 255
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(number))
        noisy = clean + sigma / 255 * noise
        restored = model(noisy, torch.full((1,), sigma / 255))
        for name, one in (("noisy", noisy), ("restored", restored), ("clean", clean)):
            figures.append(_figure(name, one, clean))
    words = f"Noise of {sigma:g} of 255, and what is left of it."
    return _section("Before and after", tag("p", words), tag("div", *figures, class_="images"))


def _figure(name: str, image: Tensor, clean: Tensor) -> Html:
    error = float((image - clean).square().mean())
    caption = name if error == 0 else f"{name}, {-10 * torch.tensor(error).log10():.2f} dB"
    pixels = (255 * image[0]).round().clamp(0, 255).to(torch.uint8)
    shown = tag("img", src=image_data_url(pixels, WIDE), alt=f"{name} image")
    return tag("figure", shown, tag("figcaption", caption), style="display: inline-block; margin: 4px")


def _curves(run: Run) -> Html | None:
    if not run.epochs:
        return None
    training = Series("training", run.column("train_loss"), "s-train")
    every = run.section("train").get("log_steps", 100)
    across = f"step / {every}"
    chart = Chart("Loss", across, 1, [training], lambda value: f"{value:.5f}", lambda value: f"{value:g}")
    return _section("Training", tag("p", "The squared error over the noise level, mean of a batch."), line_chart(chart))
