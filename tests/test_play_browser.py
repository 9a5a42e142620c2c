"""``opteq play`` in headless Chromium, used as a person would: draw, drop, slide, wrong files, two tabs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from browser import CONTRAST, SCREENSHOTS, Browser, Tab, needs_chromium
from opteq import data
from opteq.models.denoiser import Denoiser, DenoiserConfig

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import uvicorn

from opteq.play.app import make_app, open_session
from opteq.play.command import bound_socket

pytestmark = needs_chromium

SEVEN = [(0.4, 0.3), (0.5, 0.3), (0.6, 0.3), (0.56, 0.42), (0.52, 0.54), (0.48, 0.66), (0.44, 0.78)]
PREDICTED = "document.querySelector('#answer .bar span')?.innerText"
RADIUS = "document.querySelector('#point').innerText.match(/piece\\s+([0-9.e-]+)/)?.[1]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of the page for the digits of the package, and for a small denoiser."""
    torch.manual_seed(0)
    config = DenoiserConfig(channels=(1, 2, 4), kernel_size=3)
    denoiser = Denoiser(config).save(tmp_path_factory.mktemp("models") / "denoiser")
    addresses, servers = {}, []
    for name, source in (("digits", Path("digits")), ("denoiser", denoiser)):
        listening = bound_socket(0)
        server = uvicorn.Server(uvicorn.Config(make_app(open_session(source)), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        servers.append((server, thread))
        addresses[name] = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    while not all(server.started for server, _ in servers):
        time.sleep(0.02)
    yield addresses
    for server, thread in servers:
        server.should_exit = True
        thread.join(20)


def drawn(browser: Browser, address: str, width: int = 1280, scheme: str = "light") -> Tab:
    """A tab in which a seven was drawn and answered."""
    tab = browser.tab()
    tab.open(address, width, scheme)
    tab.drag("#canvas", SEVEN)
    tab.wait(f"{PREDICTED} === '7'")
    tab.wait(RADIUS, 60)
    return tab


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_drawn_digit_is_recognised(browser: Browser, served: dict[str, str], width: int, scheme: str) -> None:
    tab = drawn(browser, served["digits"], width, scheme)
    assert "Evidence for 7 against" in tab.text("#answer")
    assert "An equilibrium exists: yes" in tab.text("#certificate")
    assert tab.troubles == []
    assert tab.evaluate(CONTRAST) == []
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    tab.screenshot(SCREENSHOTS / f"play-{width}-{scheme}.png")


def test_sliders_show_steps_scale_terms_and_set_the_tolerance(browser: Browser, served: dict[str, str]) -> None:
    tab = drawn(browser, served["digits"])
    last = int(tab.evaluate("document.querySelector('#step').max"))
    state = tab.evaluate("document.querySelector('#state').src")
    tab.slide("#step", 0)
    assert f"0 of {last}" in tab.text("#solve")
    assert "Objective: 0.00" in tab.text("#solve")
    assert tab.evaluate("document.querySelector('#state').src") != state
    tab.slide("#step", last)
    certificate = tab.text("#point")
    tab.slide("#control-tol", -6)
    tab.wait(f"Number(document.querySelector('#step').max) > {last}")  # more steps for a tighter tolerance
    tab.slide("#control-coupling", 0.5)
    tab.wait(f"{RADIUS} && document.querySelector('#point').innerText !== {certificate!r}", 60)
    tab.click("#answer .choice:last-of-type")
    tab.wait("document.querySelector('.choice:last-of-type').ariaPressed === 'true'")
    tab.click("#reset")
    tab.wait(f"document.querySelector('#step').max === '{last}'")
    assert tab.troubles == []


def test_files_are_dropped_and_chosen_and_wrong_ones_refused(
    browser: Browser, served: dict[str, str], tmp_path: Path
) -> None:
    digits = data.load("digits")
    good, tall = tmp_path / "digit.png", tmp_path / "photo.jpg"
    Image.fromarray(digits.test.images[0, 0].numpy()).resize((64, 64)).save(good)
    Image.frombytes("RGB", (1600, 1200), os.urandom(1600 * 1200 * 3)).save(tall, quality=100)
    assert tall.stat().st_size > 2.5 * 2**20
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    tab = browser.tab()
    tab.open(served["digits"])
    error = "document.querySelector('#error').innerText"
    tab.drop("#canvas", tmp_path / "notes.txt")
    tab.wait(f"{error} === 'notes.txt is not an image.'")
    tab.choose_file("#file", tmp_path / "broken.png")
    tab.wait(f'{error} === "broken.png can\'t be read as an image."')
    assert "Draw something first." in tab.text("#answer")
    tab.drop("#canvas", good)
    tab.wait(f"{PREDICTED} === '{int(digits.test.labels[0])}'")
    assert tab.evaluate(error) == ""
    before = tab.text("#answer")
    tab.choose_file("#file", tall)  # larger than a request may be: the page makes it smaller
    tab.wait(f"document.querySelector('#answer').innerText !== {before!r}")
    assert tab.evaluate(error) == ""
    tab.click("#clear")
    assert "Draw something first." in tab.text("#answer")
    assert tab.text("#point") == ""
    assert tab.troubles == []


def test_two_tabs_do_not_share_what_is_drawn(browser: Browser, served: dict[str, str]) -> None:
    first = drawn(browser, served["digits"])
    second = browser.tab()
    second.open(served["digits"])
    assert "Draw something first." in second.text("#answer")
    second.drag("#canvas", [(0.5, 0.2), (0.5, 0.5), (0.5, 0.8)])
    first.slide("#control-coupling", 0.5)
    second.wait(f"{PREDICTED} !== undefined && {PREDICTED} !== '7'")
    first.wait(f"{PREDICTED} === '7'")
    assert first.troubles == second.troubles == []


def test_a_denoiser_is_shown_before_and_after(browser: Browser, served: dict[str, str], tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    Image.linear_gradient("L").resize((40, 32)).save(photo)
    tab = browser.tab()
    tab.open(served["denoiser"])
    tab.drop("#canvas", photo)
    tab.wait("document.querySelectorAll('#answer img').length === 2")
    facts = tab.text("#solve")
    assert "energy minimised\tyes" in facts
    assert "PSNR before, after" in facts
    assert "It is unique: yes" in tab.text("#certificate")
    tab.slide("#control-sigma", 40)
    tab.wait(f"document.querySelector('#solve').innerText !== {facts!r}")
    tab.click("#control-add_noise")
    tab.wait("!document.querySelector('#solve').innerText.includes('PSNR')")
    assert tab.troubles == []


def test_it_says_when_the_server_has_gone(browser: Browser, served: dict[str, str]) -> None:
    tab = drawn(browser, served["digits"])
    tab.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    tab.slide("#control-coupling", 0.3)
    tab.wait("document.querySelector('#error').innerText.includes('does not answer')")
