"""Charts, matrices and formulas: what they draw is where the numbers say."""

from __future__ import annotations

import base64
import io
import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

import opteq
from all_cases import CASES
from cases import Case
from opteq.problems.certificate import Certificate
from opteq.problems.hidden import Hidden
from opteq.report.charts.axes import integer_ticks, linear_axis, log_axis
from opteq.report.charts.curves import Chart, Series, line_chart
from opteq.report.charts.images import HIT, MISS, heatmap, image_data_url, matrix_image, signed_map
from opteq.report.charts.matrix import class_accuracies, confused_pairs, confusion_matrix
from opteq.report.charts.waterfall import style_of, terms_table, waterfall
from opteq.report.formula import formulas
from opteq.report.guarantees import guarantees
from opteq.report.html.markup import Html, join, tag
from opteq.report.html.numbers import decimal, percent, scientific
from opteq.report.html.typeset import typeset
from opteq.report.sections import objective

LETTER = re.compile(r"<i>([A-Za-z])</i>")


def parsed(markup: Html) -> ET.Element:
    return ET.fromstring(markup)


def chart(*values: list[float], log: bool = False, first: int = 1) -> ET.Element:
    series = [Series(name, line, f"s-{name}") for name, line in zip(("train", "test"), values, strict=False)]
    return parsed(line_chart(Chart("Loss", "epoch", first, series, decimal, str, log)))


def points(drawn: ET.Element, line: int = 0) -> list[list[tuple[float, float]]]:
    """The pieces of a line, as lists of places."""
    groups = [one for one in drawn.iter("g") if one.get("class", "").startswith("line")]
    path = groups[line].find("path")
    pieces = [] if path is None else re.findall(r"M([^M]+)", path.get("d", ""))
    return [[(float(x), float(y)) for x, y in (place.split() for place in piece.split("L"))] for piece in pieces]


def test_a_line_goes_through_its_numbers() -> None:
    (places,) = points(chart([0.0, 1.0, 2.0, 4.0]))
    xs, ys = zip(*places, strict=True)
    steps = [b - a for a, b in pairwise(xs)]
    assert max(steps) - min(steps) < 0.02
    unit = ys[0] - ys[1]
    assert unit > 0
    assert ys[0] - ys[2] == pytest.approx(2 * unit, abs=0.02)
    assert ys[0] - ys[3] == pytest.approx(4 * unit, abs=0.02)


def test_a_logarithmic_line_falls_by_equal_steps_and_zero_lies_at_the_bottom() -> None:
    (places,) = points(chart([1.0, 0.1, 0.01, 0.0], log=True))
    ys = [y for _, y in places]
    assert ys[1] - ys[0] == pytest.approx(ys[2] - ys[1], abs=0.02)
    assert ys[3] == max(ys)


def test_what_is_not_finite_leaves_a_gap() -> None:
    drawn = chart([1.0, 2.0, math.nan, 3.0, math.inf, 2.0, 1.0], [math.nan] * 7)
    assert [len(piece) for piece in points(drawn)] == [2, 2]
    assert points(drawn, 1) == []
    assert "test: no finite value" in str(drawn.get("aria-label"))
    tips = [one.get("data-tip", "") for one in drawn.iter("g") if one.get("class") == "band"]
    assert tips[2] == "epoch 3 train not finite test not finite"  # XML reads newlines as blanks


def test_one_epoch_is_a_dot() -> None:
    drawn = chart([1.0], [2.0])
    assert points(drawn) == []
    dots = [dot for one in drawn.iter("g") if one.get("class", "").startswith("line") for dot in one.iter("circle")]
    assert len(dots) == 2


def test_names_at_the_ends_do_not_touch() -> None:
    drawn = chart([1.0, 0.001], [1.0, 0.0])
    heights = [float(one.get("y", 0)) for one in drawn.iter("text") if one.get("class", "").startswith("name")]
    assert abs(heights[0] - heights[1]) >= 17


def test_long_runs_have_few_readouts() -> None:
    bands = [one for one in chart([1.0 / k for k in range(1, 1001)]).iter("g") if one.get("class") == "band"]
    assert 100 <= len(bands) <= 160


def test_axes_hold_their_values() -> None:
    for values in ([0.0, 0.0], [5.0], [-3.0, 1e6], [1e-9, 2e-9], [math.nan, 2.0], []):
        axis = linear_axis(values, 0, 100)
        assert len(axis.ticks) >= 2
        assert all(axis.low <= value <= axis.high for value in values if math.isfinite(value))
    assert linear_axis([0.5, 0.99], 0, 1, ceiling=1.0).high == 1.0
    assert len(log_axis([1e-30, 1e5], 0, 1).ticks) <= 8
    assert integer_ticks(0, 1000)[-1] == 1000


def test_a_waterfall_goes_from_zero_to_the_sum() -> None:
    drawn = parsed(waterfall({"one": 4.0, "two": -1.0, "three": -8.0}, "difference", "this"))
    rows = [one for one in drawn.iter("g") if one.get("class", "").startswith("row")]
    assert [row.findall("text")[0].text for row in rows] == ["one", "two", "three", "difference"]
    assert [row.findall("text")[1].text for row in rows] == ["+4.00", "−1.00", "−8.00", "−5.00"]
    assert [str(row.get("class")).split()[1] for row in rows] == ["for", "against", "against", "total"]
    bars = [row.findall("rect")[1] for row in rows]
    left, width = ([float(bar.get(key, 0)) for bar in bars] for key in ("x", "width"))
    assert width[0] == pytest.approx(4 * width[1], abs=0.1)
    assert width[2] == pytest.approx(8 * width[1], abs=0.1)
    assert left[0] + width[0] == pytest.approx(left[1] + width[1], abs=0.1)  # a bar begins where the last one ended
    assert left[2] == pytest.approx(left[3], abs=0.1)
    assert "together −5.00" in str(drawn.get("aria-label"))


def test_shares_that_are_not_finite_are_not_drawn() -> None:
    assert "not finite" in waterfall({"one": math.inf}, "difference", "this")
    assert parsed(waterfall({"one": 0.0}, "difference", "this")).tag == "svg"


def test_the_table_of_terms_ends_with_their_sum() -> None:
    table = parsed(terms_table({"quadratic": 0.0, "input": 0.0}, {"quadratic": 4.0, "input": -9.0}))
    assert [cell.text for cell in list(table.iter("tr"))[-1]] == ["objective", "0", "−5.000"]


def test_signed_maps_have_a_color_per_sign() -> None:
    url = signed_map(torch.tensor([[1.0, -1.0], [0.0, 0.25]]))
    image = Image.open(io.BytesIO(base64.b64decode(url.split(",")[1])))
    pixels = torch.tensor(np.array(image))
    assert pixels[0, 0].tolist() == [*HIT, 255]
    assert pixels[0, 1].tolist() == [*MISS, 255]
    assert pixels[1, :, 3].tolist() == [0, 128]  # as strong as the root of their share
    assert len(signed_map(torch.randn(400, 300))) < 60_000


def test_a_small_matrix_is_a_table() -> None:
    counts = torch.tensor([[8, 2], [0, 5]])
    table = parsed(confusion_matrix(counts, ["a", "b"]))
    rows = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    assert rows[1:] == [["a", "8", "2", "80.0\u00a0%"], ["b", "·", "5", "100\u00a0%"]]
    assert class_accuracies(counts, ["a", "b"]) is None
    empty = parsed(confusion_matrix(torch.zeros(2, 2, dtype=torch.int64), ["a", "b"]))
    assert "–" in "".join(empty.itertext())


def test_frequent_mistakes_come_first() -> None:
    counts = torch.tensor([[8, 2, 0], [1, 5, 4], [0, 0, 9]])
    listed = ["".join(one.itertext()) for one in parsed(confused_pairs(counts, ["a", "b", "c"])).iter("li")]
    assert [line.split(" time")[0] for line in listed] == [
        "b predicted as c4",
        "a predicted as b2",
        "b predicted as a1",
    ]
    assert "No image was misclassified" in confused_pairs(torch.eye(3, dtype=torch.int64), ["a", "b", "c"])


def decoded(address: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(address.split(",", 1)[1])))


def test_a_large_matrix_is_a_image() -> None:
    counts = torch.eye(100, dtype=torch.int64) * 9
    counts[3, 7] = 1
    image = decoded(matrix_image(counts))
    assert (image.size, image.mode) == ((100, 100), "RGBA")
    pixel = image.load()
    assert pixel is not None
    assert pixel[3, 4] == (*pixel[3, 4][:3], 0)  # x is the column: row 4 was never predicted as 3
    assert pixel[5, 5][3] == 255
    assert pixel[7, 3][3] == 255  # the only mistake is the most frequent one
    assert pixel[7, 3][:3] != pixel[5, 5][:3]
    names = [f"c{index}" for index in range(100)]
    markup = confusion_matrix(counts, names)
    assert len(markup) < 40_000
    accuracies = class_accuracies(counts, names)
    assert accuracies is not None
    assert accuracies.index("c3<") < accuracies.index("c0<")  # the worst comes first


def test_images_keep_their_pixels() -> None:
    grey = torch.arange(16, dtype=torch.uint8).reshape(1, 4, 4)
    assert list(decoded(image_data_url(grey)).tobytes()) == list(range(16))
    colour = torch.randint(256, (3, 5, 4), dtype=torch.uint8)
    image = decoded(image_data_url(colour))
    assert (image.size, image.getpixel((1, 2))) == ((4, 5), tuple(colour[:, 2, 1].tolist()))
    large = decoded(image_data_url(torch.zeros(3, 224, 320, dtype=torch.uint8)))
    assert max(large.size) == 160
    bright = decoded(heatmap(torch.tensor([[0.0, 1.0], [2.0, math.nan]]), 0.0, 1.0)).convert("L")
    assert bright.getpixel((0, 0)) == bright.getpixel((1, 1)) < bright.getpixel((1, 0)) == bright.getpixel((0, 1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_problem_has_a_formula_with_the_terms_that_it_tells(case: Case) -> None:
    problem = case.problem()
    shown = formulas(problem)
    for one in shown:
        for piece in (one.over, one.step, *(term.body for term in one.terms), *(name for name, _ in one.symbols)):
            ET.fromstring(f"<p>{piece}</p>")
    hidden = problem(case.input())
    if not isinstance(hidden, Hidden) or isinstance(problem, opteq.Objective):  # a user names the terms of an objective
        return
    told = {name.rsplit(".", 1)[-1] for name in hidden.terms(hidden.start())}
    named = {term.name for one in shown for term in one.terms}
    assert named <= told
    # Bars are labelled by these names: the legend below the formula has to say what they stand for.
    legend = objective([("layer", one) for one in shown])
    assert all(f"<b>{name}: </b>" in legend for name in named)
    # A reader meets no letter of the objective without being told what it is.
    letters = {part for one in shown for term in one.terms for part in LETTER.findall(term.body)}
    explained = {part for one in shown for symbol, _ in one.symbols for part in LETTER.findall(symbol)}
    assert letters - explained <= {"f", "R", "M"}  # what stands below the term or the formula says what these are
    assert told - named <= {"penalty"}  # a constraint or no penalty at all is not written as a term
    assert all(style_of(name) != "t-other" for name in told)


def test_letters_are_set_as_mathematics() -> None:
    assert typeset("⟨Ux, z_i+1⟩") == "⟨<i>U</i><i>x</i>, <i>z</i><sub><i>i</i>+1</sub>⟩"
    assert typeset("exp(−γ‖q‖^2)") == "exp(−γ‖<i>q</i>‖<sup>2</sup>)"


def test_certificates_are_told_in_words() -> None:
    reasons = {"exists": "because A", "unique": "because B", "contraction": "k <= 2 mu", "lipschitz": "no bound"}
    known = guarantees([("", Certificate(True, True, 0.5, 3.0, reasons))])
    assert "An equilibrium exists for every input." in known
    assert "a contraction with factor at most 0.500" in known
    assert "features is at most 3.00." in known
    assert "K ≤ 2 μ." in known
    assert "unknown" not in known
    unknown = guarantees([("", Certificate(reasons=reasons))])
    assert unknown.count('class="unknown"') == 4
    assert "No bound." in unknown
    assert "A step may increase distances, by a factor of at most 1.20" in guarantees(
        [("", Certificate(contraction=1.2))]
    )
    shown = guarantees([("", Certificate(reasons=reasons))], certified=0.973)
    assert "97.3" in shown
    assert "at the point" in shown
    assert "at the point" not in unknown
    assert "No certificate could be computed: NaN" in guarantees([("", "NaN")])
    same = {"unique": "every part has only one. part 0: Banach; part 1: Banach"}
    assert "Each of the 2 parts: Banach." in guarantees([("", Certificate(unique=True, reasons=same))])


def test_markup_escapes_what_is_not_markup() -> None:
    assert tag("p", "<b>", Html("<b>x</b>"), title='"') == '<p title="&quot;">&lt;b&gt;<b>x</b></p>'
    assert join("a&b", None, Html("<br>")) == "a&amp;b<br>"


def test_numbers_at_their_edges() -> None:
    assert percent(0.9999) == "99.9\u00a0%"
    assert percent(float("nan")) == "–"
    assert decimal(999.96) == "1,000"
    assert scientific(0.00099999) == "9.9·10⁻⁴"
