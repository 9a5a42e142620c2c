"""Test pictures whose every pixel has a class: what was said about them, class by class, and a few side by side."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.common.errors import ConvergenceWarning
from opteq.data.dataset import IGNORED
from opteq.report.charts.images import WIDE, class_colour, labels_picture, photograph
from opteq.report.charts.matrix import confused_pairs
from opteq.report.examine import Pictures, SolveRecord, Watch
from opteq.report.html.markup import Html, join, tag
from opteq.report.html.numbers import percent, plural
from opteq.report.sections import section

_BATCH = 2  # such pictures are large
_SHOWN = 4


@dataclass(frozen=True)
class MapExample:
    """One picture: ``pixels`` uint8 ``(C, H, W)``, true and predicted classes ``(H, W)``, 255 for none."""

    pixels: Tensor
    labels: Tensor
    predicted: Tensor

    @property
    def accuracy(self) -> float:
        """Share of the pixels with a label that were right."""
        judged = self.labels != IGNORED
        return float((self.predicted == self.labels)[judged].double().mean()) if bool(judged.any()) else 0.0


@dataclass(frozen=True)
class MapExamination:
    """What a model said about the pixels of test pictures.

    Attributes:
        confusion: counts of pixels, a row for each true class.
        examples: a few pictures.
        solves: one record a layer; empty for a baseline.
        seen: how many pictures were looked at.
        total: how many there are.
    """

    confusion: Tensor
    examples: list[MapExample]
    solves: list[SolveRecord]
    seen: int
    total: int

    @property
    def overlap(self) -> Tensor:
        """Intersection over union of every class, NaN where a class neither occurs nor is named."""
        right = self.confusion.diagonal().double()
        return right / (self.confusion.sum(dim=0) + self.confusion.sum(dim=1) - right)

    @property
    def mean_overlap(self) -> float:
        """Its mean over classes."""
        return float(self.overlap.nanmean())


@torch.no_grad()
def examine_maps(model: nn.Module, pictures: Pictures, seconds: float) -> MapExamination:
    """Predict the test pictures until all are done or ``seconds`` are over, in a mixed order."""
    device = next(model.parameters()).device
    order = torch.randperm(len(pictures.labels), generator=torch.Generator().manual_seed(0))
    size = len(pictures.classes)
    confusion = torch.zeros(size, size, dtype=torch.int64)
    examples: list[MapExample] = []
    seen = 0
    model.eval()
    watch, deadline = Watch(model), time.monotonic() + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for indices in torch.split(order, _BATCH):
            predicted = model(pictures.batch(indices, device)).argmax(dim=1).cpu()
            watch.look()
            labels = pictures.labels[indices].long()
            judged = labels != IGNORED
            cells = labels[judged] * size + predicted[judged]
            confusion += torch.bincount(cells, minlength=size * size).reshape(size, size)
            seen += len(indices)
            for place, index in enumerate(indices[: _SHOWN - len(examples)].tolist()):
                examples.append(MapExample(pictures.images[index], labels[place], predicted[place]))
            if time.monotonic() > deadline:
                break
    return MapExamination(confusion, examples, watch.records(), seen, len(order))


def pixel_mistakes(found: MapExamination, classes: Sequence[str]) -> Html:
    """How well every class is found, and which is taken for which."""
    judged = int(found.confusion.sum())
    of = (
        plural(found.seen, "test picture")
        if found.seen == found.total
        else f"{found.seen:,} of {found.total:,} pictures"
    )
    lead = (
        f"Over {plural(judged, 'pixel')} with a class, in {of}. Intersection over union is the share of pixels that "
        "are right among all that are of a class or were said to be; the mean counts every class the same."
    )
    true, right = found.confusion.sum(dim=1).tolist(), found.confusion.diagonal().tolist()
    overlap = found.overlap.tolist()
    head = ("class", "intersection over union", "found", "share of all pixels")
    rows = [
        tag(
            "tr",
            tag("th", _swatch(place), " ", name, scope="row"),
            tag("td", percent(overlap[place])),
            tag("td", percent(right[place] / true[place] if true[place] else None)),
            tag("td", percent(true[place] / max(judged, 1))),
        )
        for place, name in enumerate(classes)
    ]
    columns = tag("tr", *(tag("th", name, scope="col") for name in head))
    table = tag("table", tag("thead", columns), tag("tbody", *rows), class_="numbers")
    scroller = tag("div", table, class_="scroller", tabindex="0", role="region", aria_label="Every class in numbers")
    pairs = confused_pairs(found.confusion, classes, "pixel")
    aside = tag("div", tag("h3", "Most frequent mistakes"), pairs)
    return section("mistakes", "Where it errs", tag("div", scroller, aside, class_="beside"), lead=lead)


def map_cards(examples: Sequence[MapExample], classes: Sequence[str]) -> Html:
    """Every example beside what it shows and what was said to be there."""
    lead = "Each picture with the true classes of its pixels, dark where there are none, and with the predicted ones."
    named = torch.cat([torch.cat((one.labels.flatten(), one.predicted.flatten())) for one in examples])
    shown = torch.bincount(named, minlength=len(classes))[: len(classes)].nonzero().flatten().tolist()
    keys = [tag("span", _swatch(place), " ", classes[place], class_="key") for place in shown]
    legend = tag("p", *(join(key, " ") for key in keys), class_="note")
    every = tag("div", *(_card(one) for one in examples), class_="cards wide")
    return section("pictures", "A few pictures, pixel by pixel", legend, every, lead=lead)


def _card(example: MapExample) -> Html:
    views = (
        ("picture", photograph(example.pixels, WIDE), "test picture"),
        ("true", labels_picture(example.labels, WIDE), "true classes of its pixels"),
        ("predicted", labels_picture(example.predicted, WIDE), "predicted classes of its pixels"),
    )
    figures = [
        tag("figure", tag("img", src=source, alt=words), tag("figcaption", caption)) for caption, source, words in views
    ]
    header = tag("header", tag("b", percent(example.accuracy)), tag("span", "of its pixels are right", class_="aside"))
    return tag("article", header, tag("div", *figures, class_="views three"), class_="card")


def _swatch(place: int) -> Html:
    red, green, blue = class_colour(place)
    return tag("i", class_="swatch", style=f"--c:rgb({red},{green},{blue})")
