"""The report's part on segmentation: metrics per class, and example label maps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.common.errors import ConvergenceWarning
from opteq.data.dataset import IGNORE_INDEX
from opteq.report.charts.images import WIDE, class_color, image_data_url, label_map
from opteq.report.charts.matrix import confused_pairs
from opteq.report.html.markup import Html, join, scroller, tag
from opteq.report.html.numbers import percent, plural
from opteq.report.predictions import LabelledImages, SolveMonitor, SolveRecord
from opteq.report.sections import section

_BATCH = 2  # the images are large
_SHOWN = 4


@dataclass(frozen=True)
class SegmentationExample:
    """One image, uint8 ``(C, h, w)``, with true and predicted label maps ``(h, w)``; 255 for no class."""

    pixels: Tensor
    labels: Tensor
    predicted: Tensor

    @property
    def accuracy(self) -> float:
        """Fraction of correct pixels among those with a class."""
        labelled = self.labels != IGNORE_INDEX
        return float((self.predicted == self.labels)[labelled].double().mean()) if bool(labelled.any()) else 0.0


@dataclass(frozen=True)
class SegmentationResult:
    """A model's predictions for the pixels of test images.

    Attributes:
        confusion: counts of pixels, with a row per true class.
        examples: a few images.
        solves: one record per layer; empty for a baseline.
        seen: number of images that were evaluated.
        total: number of test images.
    """

    confusion: Tensor
    examples: list[SegmentationExample]
    solves: list[SolveRecord]
    seen: int
    total: int

    @property
    def overlap(self) -> Tensor:
        """Intersection over union per class; NaN where a class neither occurs nor is predicted."""
        right = self.confusion.diagonal().double()
        return right / (self.confusion.sum(dim=0) + self.confusion.sum(dim=1) - right)

    @property
    def mean_overlap(self) -> float:
        """Its mean over classes."""
        return float(self.overlap.nanmean())


@torch.no_grad()
def evaluate_segmentation(model: nn.Module, images: LabelledImages, seconds: float) -> SegmentationResult:
    """Predict the test images in random order, until all are done or ``seconds`` have passed."""
    device = next(model.parameters()).device
    order = torch.randperm(len(images.labels), generator=torch.Generator().manual_seed(0))
    size = len(images.classes)
    confusion = torch.zeros(size, size, dtype=torch.int64)
    examples: list[SegmentationExample] = []
    count = 0
    model.eval()
    monitor, deadline = SolveMonitor(model), time.monotonic() + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for indices in torch.split(order, _BATCH):
            predicted = model(images.batch(indices, device)).argmax(dim=1).cpu()
            monitor.record()
            labels = images.labels[indices].long()
            labelled = labels != IGNORE_INDEX
            cells = labels[labelled] * size + predicted[labelled]
            confusion += torch.bincount(cells, minlength=size * size).reshape(size, size)
            count += len(indices)
            for place, index in enumerate(indices[: _SHOWN - len(examples)].tolist()):
                examples.append(SegmentationExample(images.images[index], labels[place], predicted[place]))
            if time.monotonic() > deadline:
                break
    return SegmentationResult(confusion, examples, monitor.records(), count, len(order))


def pixel_mistakes(result: SegmentationResult, classes: Sequence[str]) -> Html:
    """Metrics per class, and the most frequent confusions."""
    labelled = int(result.confusion.sum())
    of = (
        plural(result.seen, "test image")
        if result.seen == result.total
        else f"{result.seen:,} of {result.total:,} images"
    )
    lead = (
        f"Over {plural(labelled, 'pixel')} with a class, in {of}. Intersection over union is the number of correct "
        "pixels over the number of pixels that belong to a class or were predicted as it."
    )
    true, right = result.confusion.sum(dim=1).tolist(), result.confusion.diagonal().tolist()
    overlap = result.overlap.tolist()
    head = ("class", "intersection over union", "found", "share of all pixels")
    rows = [
        tag(
            "tr",
            tag("th", _swatch(place), " ", name, scope="row"),
            tag("td", percent(overlap[place])),
            tag("td", percent(right[place] / true[place] if true[place] else None)),
            tag("td", percent(true[place] / max(labelled, 1))),
        )
        for place, name in enumerate(classes)
    ]
    columns = tag("tr", *(tag("th", name, scope="col") for name in head))
    table = tag("table", tag("thead", columns), tag("tbody", *rows), class_="numbers")
    numbers = scroller(table, "Every class in numbers")
    pairs = confused_pairs(result.confusion, classes, "pixel")
    aside = tag("div", tag("h3", "Most frequent mistakes"), pairs)
    return section("mistakes", "Mistakes", tag("div", numbers, aside, class_="beside"), lead=lead)


def segmentation_cards(examples: Sequence[SegmentationExample], classes: Sequence[str]) -> Html:
    """One card per example: image, true and predicted label map."""
    lead = "Each image with its true label map, dark where there is no class, and the predicted one."
    named = torch.cat([torch.cat((one.labels.flatten(), one.predicted.flatten())) for one in examples])
    shown = torch.bincount(named, minlength=len(classes))[: len(classes)].nonzero().flatten().tolist()
    keys = [tag("span", _swatch(place), " ", classes[place], class_="key") for place in shown]
    legend = tag("p", *(join(key, " ") for key in keys), class_="note")
    every = tag("div", *(_card(one) for one in examples), class_="cards wide")
    return section("images", "Example images", legend, every, lead=lead)


def _card(example: SegmentationExample) -> Html:
    views = (
        ("image", image_data_url(example.pixels, WIDE), "test image"),
        ("true", label_map(example.labels, WIDE), "true label map"),
        ("predicted", label_map(example.predicted, WIDE), "predicted label map"),
    )
    figures = [
        tag("figure", tag("img", src=source, alt=words), tag("figcaption", caption)) for caption, source, words in views
    ]
    correct = tag("span", "of its pixels are correct", class_="aside")
    header = tag("header", tag("b", percent(example.accuracy)), correct)
    return tag("article", header, tag("div", *figures, class_="views three"), class_="card")


def _swatch(place: int) -> Html:
    red, green, blue = class_color(place)
    return tag("i", class_="swatch", style=f"--c:rgb({red},{green},{blue})")
