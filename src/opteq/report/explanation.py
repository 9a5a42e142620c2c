"""The page of ``opteq predict --explain``: images with evidence, counterfactuals and equilibria."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from opteq.analysis.terms import evaluation_mode
from opteq.common.files import plain_errors, write_atomically
from opteq.models import Classifier, equilibria
from opteq.models.prediction import ImageLike, Preprocessing, stack
from opteq.report import sections
from opteq.report.cards import cards
from opteq.report.examples import Example, explain_images
from opteq.report.formula import formulas
from opteq.report.frame import html_page
from opteq.report.guarantees import guarantees
from opteq.report.html.markup import join, tag
from opteq.report.html.numbers import plural


def write_explanation(
    model: Classifier, images: Sequence[ImageLike], names: Sequence[str], target: Path, title: str
) -> Path:
    """Write the explanations of ``images`` to the HTML file ``target``.

    Args:
        model: a trained classifier.
        images: see :meth:`~opteq.models.Classifier.predict`.
        names: of the images, for the page.
        target: the file.
        title: the page's heading.
    """
    preprocessing = Preprocessing.of(model.config)
    weight = next(model.parameters())
    pixels = [preprocessing.pixels(image) for image in images]
    with evaluation_mode(model):
        # One batch where all images have one size; images of a model without a saved size may differ.
        batches = [pixels] if len({one.shape for one in pixels}) == 1 else [[one] for one in pixels]
        examples: list[Example] = []
        for batch in batches:
            stacked = stack(batch)
            x = preprocessing.normalised(stacked.to(weight.device)).to(weight.dtype)
            first = len(examples)
            examples += explain_images(model, x, stacked, [None] * len(batch), names[first : first + len(batch)])
    layers = equilibria(model)
    parts = [
        cards(examples, preprocessing.classes, "Images"),
        sections.objective([(name, one) for name, layer in layers for one in formulas(layer.problem)]),
    ]
    if layers:
        parts.append(guarantees([(name, layer.problem.certificate()) for name, layer in layers]))
    what = join(tag("b", str(model.config["name"])), f"on {plural(len(images), 'image')}", between=" ")
    html = html_page(title, "explanation of predictions", what, None, None, join(*parts))
    with plain_errors(f"writing {target}", "or choose another place with --explain FILE"):
        write_atomically(target, html.encode(errors="replace"))
    return target
