"""The report in headless Chromium: no console errors, no sideways scrolling, light and dark, phone and desk."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opteq.report import write
from opteq.report.page import render
from opteq.report.run import read_run
from test_report import invented, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not on this machine; on Debian: apt-get install -y chromium"
)

# Without the last of these Chromium asks for updates, which machines without a network answer with errors.
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic",
]  # fmt: skip


class Browser:
    """Chromium driven by its DevTools protocol over a pair of pipes: one JSON message after the other, a zero between.

    Pipes need nothing but the standard library, where the protocol's usual socket would need a WebSocket client.
    """

    def __init__(self, profile: Path) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # The protocol wants file descriptors 3 and 4; a shell puts them there.
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        command = ["bash", "-c", script, str(CHROMIUM), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self.troubles: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; what happens meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        number = self._number
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Show a page at a width, for a reader who prefers light or dark."""
        self.troubles.clear()
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + 20
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < deadline, "the page did not finish loading"
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as an image."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def key(self, name: str) -> None:
        """Press and let go."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def close(self) -> None:
        """End it in good order; Chromium's many processes then end too."""
        self._session = None
        self.call("Browser.close")
        self._process.wait(timeout=20)
        os.close(self._to)
        os.close(self._from)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], 30)
            assert ready, "Chromium does not answer"
            piece = os.read(self._from, 1 << 16)
            assert piece, "Chromium has gone away"
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.troubles.append(f"exception: {event['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.troubles.append(f"console: {event['args']}")
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.troubles.append(f"log: {event['entry']['text']}")
        elif method == "Network.requestWillBeSent" and not event["request"]["url"].startswith(("file:", "data:")):
            self.troubles.append(f"request: {event['request']['url']}")


# Colours as they reach the eye: backgrounds are blended until one hides what is behind it.
CONTRAST = """
(() => {
  const parse = (colour) => {
    const numbers = colour.match(/[0-9.]+/g).map(Number);
    const [r, g, b, alpha = 1] = numbers;
    const scale = colour.startsWith("color(srgb") ? 255 : 1;
    return [r * scale, g * scale, b * scale, alpha];
  };
  const over = (top, low) => top.slice(0, 3).map((v, i) => v * top[3] + low[i] * (1 - top[3]));
  const linear = (v) => v <= 10.31 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const behind = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) {
      layers.unshift(parse(getComputedStyle(one).backgroundColor));
      if (layers[0][3] === 1) break;
    }
    return layers.reduce((low, top) => over(top, low), [255, 255, 255]);
  };
  const bad = [];
  for (const one of document.querySelectorAll("body *")) {
    const written = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!written || !one.getClientRects().length || one.closest("#tip, td.none")) continue;
    const style = getComputedStyle(one), back = behind(one);
    const front = over(parse(one instanceof SVGElement ? style.fill : style.color), back);
    const [high, low] = [light(front), light(back)].sort((a, b) => b - a);
    const ratio = (high + .05) / (low + .05);
    if (ratio < 4.5) bad.push(`${one.outerHTML.slice(0, 80)} ${ratio.toFixed(2)}`);
  }
  return bad;
})()
"""

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
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
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
def test_it_renders_without_errors(
    browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
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
def test_faults_are_noticed(browser: Browser, tmp_path: Path, fault: str) -> None:
    page = tmp_path / "broken.html"
    page.write_text(f"<!doctype html><title>x</title><body>{fault}</body>")
    browser.open(page, 800, "light")
    assert browser.troubles != []
    page.write_text("<!doctype html><title>x</title><link rel=icon href=data:,><body>fine</body>")
    browser.open(page, 800, "light")
    assert browser.troubles == []


def test_sideways_scrolling_and_poor_contrast_are_noticed(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "wide.html"
    page.write_text(
        '<!doctype html><meta name="viewport" content="width=device-width">'
        '<body style="background:#fff"><p style="width:700px;color:#aaa">too wide, too pale'
    )
    browser.open(page, 390, "light")
    assert browser.evaluate("document.documentElement.scrollWidth") > 390
    assert len(browser.evaluate(CONTRAST)) == 1


def test_the_switch_changes_the_colours_and_is_remembered(browser: Browser, pages: dict[str, Path]) -> None:
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


def test_charts_are_read_out_by_mouse_and_by_keys(browser: Browser, pages: dict[str, Path]) -> None:
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


def test_a_large_matrix_is_read_out_by_keys(browser: Browser, pages: dict[str, Path]) -> None:
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
