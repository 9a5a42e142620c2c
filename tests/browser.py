"""Chromium, driven as a person would use it, for tests of pages."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"

needs_chromium = pytest.mark.skipif(
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
        self._tabs: dict[str, Tab] = {}

    def tab(self) -> Tab:
        """A new tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        made = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            made.call(f"{domain}.enable")
        return made

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; what happens meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        number = self._number
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def close(self) -> None:
        """End it in good order; Chromium's many processes then end too."""
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
        tab = self._tabs.get(message.get("sessionId", ""))
        if tab is not None:
            tab.note(message.get("method"), message.get("params", {}))
        return message


class Tab:
    """A tab: what it shows, and everything that went wrong in it."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.troubles: list[str] = []
        self.allowed: tuple[str, ...] = ("file:", "data:")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def open(self, page: Path | str, width: int = 1280, scheme: str = "light") -> None:
        """Show a page at a width, for a reader who prefers light or dark."""
        self.troubles.clear()
        address = page if isinstance(page, str) else page.as_uri()
        self.allowed = ("file:", "data:") if isinstance(page, Path) else (address, "data:", "blob:")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")
        self.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 20) -> Any:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}; the page says {self.text('body')[:2000]!r}"
            time.sleep(0.02)
        return found

    def text(self, selector: str) -> str:
        """What an element shows."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, selector: str, points: list[tuple[float, float]]) -> None:
        """Press the mouse on an element and move it; points are shares of its width and height."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self._box(selector)
        at = [(box["x"] + across * box["width"], box["y"] + down * box["height"]) for across, down in points]
        self._mouse("mousePressed", *at[0])
        for place in at[1:]:
            self._mouse("mouseMoved", *place)
        self._mouse("mouseReleased", *at[-1])

    def slide(self, selector: str, value: float) -> None:
        """Move a slider, as its arrow keys do: the page hears of it."""
        target = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{target}.value = {value}; {target}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def drop(self, selector: str, path: Path) -> None:
        """Drop a file on an element."""
        x, y = self._middle(selector)
        files = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=files)

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

    def note(self, method: str | None, event: dict[str, Any]) -> None:
        """Keep what went wrong."""
        if method == "Runtime.exceptionThrown":
            self.troubles.append(f"exception: {event['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.troubles.append(f"console: {event['args']}")
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.troubles.append(f"log: {event['entry']['text']}")
        elif method == "Network.requestWillBeSent" and not event["request"]["url"].startswith(self.allowed):
            self.troubles.append(f"request: {event['request']['url']}")

    def _mouse(self, kind: str, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def _box(self, selector: str) -> dict[str, float]:
        box = "(({x, y, width, height}) => ({x, y, width, height}))"
        found: dict[str, float] = self.evaluate(
            f"{box}(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        return found

    def _middle(self, selector: str) -> tuple[float, float]:
        box = self._box(selector)
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


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
