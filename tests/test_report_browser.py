"""The report in headless Chromium: no console errors, no sideways scrolling, light and dark, phone and desk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CONTRAST, SCREENSHOTS, Browser, Tab, needs_chromium
from opteq.report import write
from opteq.report.page import render
from opteq.report.run import read_run
from test_report import invented, make_run

pytestmark = needs_chromium

MIDDLE_OF_THE_FIFTH_PLACE = """
(() => {
  const chart = document.querySelector("svg.curves");
  chart.scrollIntoView({block: "center"});
  const box = chart.querySelectorAll(".band")[4].getBoundingClientRect();
  const place = [box.x + box.width / 2, box.y + box.height / 2];
  // The page hears of the scrolling, which hides readouts, only with the next frame.
  return new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(place), 50)));
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found.tab()
    found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole report; one of many classes; one of a run that has only begun."""
    folder = tmp_path_factory.mktemp("pages")
    whole = write(make_run(folder / "whole", channels=8, epochs=12))
    (folder / "begun").mkdir()
    (folder / "begun" / "recipe.toml").write_text(
        'name = "a-long-name-without-any-place-to-break-it-' + "x" * 60 + '"\n'
    )
    many = folder / "many.html"
    many.write_text(render(read_run(folder / "begun"), invented(40, 2000)), encoding="utf-8")
    return {"whole": whole, "many": many, "begun": write(folder / "begun")}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("name", "width"), [("whole", 390), ("whole", 1280), ("many", 390), ("many", 1280), ("begun", 390)]
)
def test_it_renders_without_errors(browser: Tab, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    browser.open(pages[name], width, scheme)
    browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert browser.troubles == []
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    red = int(browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]"))
    assert red < 60 if scheme == "dark" else red > 200
    assert browser.evaluate("[...document.images].every(one => one.complete && one.naturalWidth > 0)")
    assert browser.evaluate(CONTRAST) == []
    shot = SCREENSHOTS / f"report-{name}-{width}-{scheme}.png"
    browser.screenshot(shot)
    assert shot.stat().st_size > 10_000


@pytest.mark.parametrize(
    "fault",
    [
        "<script>undefinedFunction()</script>",
        "<script>console.error('no')</script>",
        "<script>Promise.reject(new Error('no'))</script>",
        "<script>function (</script>",
        '<img src="missing.png" alt="">',
        '<script src="https://example.com/a.js"></script>',
    ],
)
def test_faults_are_noticed(browser: Tab, tmp_path: Path, fault: str) -> None:
    page = tmp_path / "broken.html"
    page.write_text(f"<!doctype html><title>x</title><body>{fault}</body>")
    browser.open(page, 800, "light")
    assert browser.troubles != []
    page.write_text("<!doctype html><title>x</title><link rel=icon href=data:,><body>fine</body>")
    browser.open(page, 800, "light")
    assert browser.troubles == []


def test_sideways_scrolling_and_poor_contrast_are_noticed(browser: Tab, tmp_path: Path) -> None:
    page = tmp_path / "wide.html"
    page.write_text(
        '<!doctype html><meta name="viewport" content="width=device-width">'
        '<body style="background:#fff"><p style="width:700px;color:#aaa">too wide, too pale'
    )
    browser.open(page, 390, "light")
    assert browser.evaluate("document.documentElement.scrollWidth") > 390
    assert len(browser.evaluate(CONTRAST)) == 1


def test_the_switch_changes_the_colours_and_is_remembered(browser: Tab, pages: dict[str, Path]) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    browser.open(pages["whole"], 1280, "light")
    before = browser.evaluate(colour)
    assert browser.evaluate("document.getElementById('theme').textContent") == "Dark"
    browser.evaluate("document.getElementById('theme').click()")
    after = browser.evaluate(colour)
    assert after != before
    assert browser.evaluate("document.getElementById('theme').textContent") == "Light"
    browser.open(pages["whole"], 1280, "light")
    assert browser.evaluate(colour) == after
    browser.evaluate("localStorage.clear()")


def test_charts_are_read_out_by_mouse_and_by_keys(browser: Tab, pages: dict[str, Path]) -> None:
    tip = "document.getElementById('tip').hidden ? null : document.getElementById('tip').innerText"
    browser.open(pages["whole"], 1280, "light")
    assert browser.evaluate(tip) is None
    place = browser.evaluate(MIDDLE_OF_THE_FIFTH_PLACE)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    assert browser.evaluate(tip).splitlines() == ["epoch 5", "train 0.400", "test 0.420"]
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert browser.evaluate(tip) is None
    browser.evaluate("document.querySelector('svg.curves').focus({preventScroll: true})")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight"):
        browser.key(key)
    assert browser.evaluate(tip).splitlines()[0] == "epoch 2"
    browser.key("Escape")
    assert browser.evaluate(tip) is None


def test_a_large_matrix_is_read_out_by_keys(browser: Tab, pages: dict[str, Path]) -> None:
    tip = "document.getElementById('tip').innerText.split('\\n')"
    browser.open(pages["many"], 390, "light")
    browser.evaluate("document.querySelector('[data-matrix]').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowDown")
    words = browser.evaluate(tip)
    assert words[1:] == ["true kind 1", "predicted <script>alert('x')</script>&\"quoted\""]
    edges = "(({left, right}) => [left, right])(document.getElementById('tip').getBoundingClientRect())"
    box = browser.evaluate(edges)
    assert box[0] >= 0
    assert box[1] <= 390
    assert browser.troubles == []
