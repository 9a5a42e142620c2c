"""The page of ``opteq play``: what it answers, what it refuses, and that nothing else can be read through it."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cli_cases import call, refused
from opteq import data, models
from opteq.common.errors import UserError
from opteq.models.denoiser import Denoiser, DenoiserConfig
from opteq.models.prediction import Preprocessing

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from opteq.play import app as serving
from opteq.play.app import make_app, open_session
from opteq.play.classifier import ClassifierSession
from opteq.play.command import bound_socket
from opteq.play.denoiser import MOST_PIXELS, DenoiserSession, shrink_to_limit

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = models.create("opteq-digits", in_channels=1, channels=4, hidden=[6])
    digits = data.load("digits")
    model.config["extra"] = {
        "classes": [HOSTILE, *digits.classes[1:]],
        "mean": list(digits.mean),
        "std": list(digits.std),
        "image_shape": [1, 8, 8],
    }
    return model.save_pretrained(tmp_path_factory.mktemp("runs") / "digits")


@pytest.fixture(scope="module")
def client(run: Path) -> TestClient:
    return TestClient(make_app(open_session(run)), base_url="http://127.0.0.1:8000")


def url_of(pixels: Image.Image, format: str = "PNG") -> str:
    buffer = io.BytesIO()
    pixels.save(buffer, format)
    return f"data:image/{format.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def digit(index: int = 0) -> Image.Image:
    return Image.fromarray(data.load("digits").test.images[index, 0].numpy())


def solve(client: TestClient, **asked: Any) -> Any:
    response = client.post("/api/solve", json={"image": url_of(digit()), **asked})
    assert response.status_code == 200, response.text
    return response.json()


def test_the_answer_is_the_models(client: TestClient, run: Path) -> None:
    model = models.from_pretrained(run)
    expected = model.predict(digit())
    found = solve(client)
    torch.testing.assert_close(torch.tensor(found["logits"]), expected.logits, rtol=1e-4, atol=1e-5)
    assert found["predicted"] == expected.index
    proof = found["evidence"]
    total = sum(share for _, share in proof["channels"]) + proof["others"] + proof["bias"]
    assert total == pytest.approx(proof["difference"], abs=1e-4)
    best, rival = found["logits"][found["predicted"]], found["logits"][proof["rival"]]
    assert proof["difference"] == pytest.approx(best - rival, abs=1e-4)
    assert found["solve"]["status"] == "CONVERGED"


def test_steps_go_down_to_the_equilibrium(client: TestClient) -> None:
    found = solve(client, tol=1e-5)
    steps = found["steps"]
    residuals, objectives = [one["residual"] for one in steps], [one["objective"] for one in steps]
    assert residuals[-1] <= 1e-5 < residuals[-2]
    rounding = 1e-6 * abs(objectives[-1])
    assert all(after <= before + rounding for before, after in pairwise(objectives))
    assert steps[-1]["probabilities"] == pytest.approx(found["probabilities"], abs=1e-3)
    assert steps[-1]["objective"] == pytest.approx(sum(steps[-1]["terms"].values()), rel=1e-5)
    assert all(one["state"].startswith("data:image/png") for one in steps)


def test_terms_can_be_scaled_and_come_back(client: TestClient) -> None:
    before = solve(client)
    off = solve(client, factors={"input": 0.0})
    assert off["steps"][-1]["terms"]["quadratic"] == pytest.approx(0, abs=1e-9)  # without an input the state is zero
    wild = solve(client, factors={"coupling": 4.0})
    assert wild["solve"]["status"] != "CONVERGED"
    assert solve(client)["logits"] == before["logits"]


def test_evidence_can_be_asked_for_against_any_class(client: TestClient) -> None:
    usual = solve(client)
    others = [index for index in range(10) if index not in (usual["predicted"], usual["evidence"]["rival"])]
    found = solve(client, rival=others[0])
    proof = found["evidence"]
    assert proof["rival"] == others[0]
    best, rival = found["logits"][found["predicted"]], found["logits"][others[0]]
    assert proof["difference"] == pytest.approx(best - rival, abs=1e-4)
    # The predicted class itself is no rival; it may become the predicted one while a slider is moved.
    assert solve(client, rival=usual["predicted"])["evidence"]["rival"] == usual["evidence"]["rival"]


def test_the_certificate_at_the_point_moves_with_the_terms(client: TestClient, run: Path) -> None:
    def certificate(**asked: Any) -> Any:
        response = client.post("/api/certificate", json={"image": url_of(digit()), **asked})
        assert response.status_code == 200, response.text
        return response.json()

    usual, half = certificate(), certificate(factors={"coupling": 0.5})
    assert usual["converged"]
    assert usual["strict_minimum"]
    # The eigenvalues of S are those of the coupling alone, so half of it halves the rate.
    assert half["contraction"] == pytest.approx(usual["contraction"] / 2, rel=0.05)
    assert half["radius"] > 0
    # Within the radius the equilibrium is affine: half a step there and back leave it where it was.
    model = models.from_pretrained(run).double()
    layer = model.equilibrium
    layer.solver = replace(layer.solver, tol=1e-12, max_steps=500)
    pixels = torch.from_numpy(np.array(digit()))[None, None]
    with torch.no_grad():
        x = model.stem(Preprocessing.of(model.config).normalised(pixels).double())
        step = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
        step *= 0.9 * usual["radius"] / step.norm()
        bend = layer(x + step) + layer(x - step) - 2 * layer(x)
        assert bend.norm() <= 1e-6 * (layer(x + step) - layer(x)).norm()
    # The prediction stays within the proved distance, and is near to another at the estimated one, in its direction.
    model, start = model.eval(), Preprocessing.of(model.config).normalised(pixels).double()
    std = torch.tensor(Preprocessing.of(model.config).std).double()
    logits = model(start.requires_grad_())[0]
    first, second = logits.topk(2).indices.tolist()
    (slope,) = torch.autograd.grad(logits[first] - logits[second], start)
    lead = float((logits[first] - logits[second]).detach() / (slope / std).norm())
    assert 0 < usual["proved"] < usual["estimated"] <= lead * (1 + 1e-3)
    with torch.no_grad():
        towards = -slope / slope.norm() * usual["proved"] / std
        assert int(model(start + towards).argmax()) == first
    assert certificate(factors={"coupling": 4.0})["converged"] is False
    assert certificate(factors={"input": 0.0})["radius"] is not None


def test_two_tabs_do_not_disturb_each_other(client: TestClient) -> None:
    asked: list[dict[str, Any]] = [{"factors": {"coupling": 0.2}}, {}, {"tol": 1e-6}]
    alone = [solve(client, **one)["logits"] for one in asked]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: solve(client, **one)["logits"], asked * 3))
    assert together == alone * 3


def test_answers_do_not_wait_for_certificates_and_those_given_up_are_passed_over(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    session = open_session(run)
    assert isinstance(session, ClassifierSession)
    begun, release, asked = threading.Event(), threading.Event(), list[float]()

    def certify(image: Any, tol: float) -> dict[str, float]:
        asked.append(tol)
        begun.set()
        with session._certified_lock:
            release.wait(30)
        return {"tol": tol}

    monkeypatch.setattr(session, "certify", certify)
    server = uvicorn.Server(uvicorn.Config(make_app(session), log_level="error"))
    listening = bound_socket(0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    port = listening.getsockname()[1]

    def post(path: str, **options: float) -> socket.socket:
        body = json.dumps({"image": url_of(digit()), **options}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        connected = socket.create_connection(("127.0.0.1", port), 30)
        connected.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return connected

    try:
        first = post("/api/certificate", tol=0.1)
        assert begun.wait(30)
        given_up, last = post("/api/certificate", tol=0.2), post("/api/certificate", tol=0.3)
        given_up.close()
        with post("/api/solve") as answered:
            assert answered.recv(100).startswith(b"HTTP/1.1 200")  # while the first certificate is being computed
        release.set()
        for one in (first, last):
            with one:
                assert one.recv(100).startswith(b"HTTP/1.1 200")
        assert asked == [0.1, 0.3]
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"image": "data:image/png;base64,AAAA"}, "can't be read as an image"),
        ({"image": "data:image/png;base64,***"}, "not valid base64"),
        ({"image": "file:///etc/passwd"}, "data URL"),
        ({"image": None}, "data URL"),
        ({"tol": 0}, "tolerance should lie in"),
        ({"tol": "small"}, "tolerance should lie in"),
        ({"factors": {"couplin": 1}}, "did you mean 'coupling'"),
        ({"factors": {"coupling": -1}}, "factor of coupling should lie in"),
        ({"factors": {"coupling": 1e9}}, "factor of coupling should lie in"),
        ({"factors": 3}, "factors should be given by the names"),
        ({"rival": 10}, "rival should be the index of a class"),
        ({"rival": True}, "rival should be the index of a class"),
        ({"path": "/etc/passwd"}, "unknown option 'path'"),
    ],
)
def test_wrong_questions_are_refused(client: TestClient, asked: dict[str, Any], words: str) -> None:
    response = client.post("/api/solve", json={"image": url_of(digit()), **asked})
    assert response.status_code == 400
    assert words in response.json()["error"]
    assert "Traceback" not in response.text


def test_a_model_without_finite_logits_names_no_class(run: Path) -> None:
    model = models.from_pretrained(run)
    for weight in model.head.parameters():
        weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="logits are not finite"):
        ClassifierSession(model, "broken").answer(digit())


def test_requests_are_limited_in_size(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    response = client.post("/api/solve", json={"image": "data:image/png;base64," + "A" * serving.LARGEST_REQUEST})
    assert response.status_code == 413
    monkeypatch.setattr(serving, "LARGEST_IMAGE", 32 * 32)
    response = client.post("/api/solve", json={"image": url_of(Image.new("L", (64, 64)))})
    assert response.status_code == 413
    assert "4096 pixels" in response.json()["error"]


def test_other_sites_cannot_use_it(client: TestClient) -> None:
    content = '{"image": ""}'
    assert client.post("/api/solve", content=content).status_code == 400  # what a form of another site could send
    kind = {"Content-Type": "application/json"}
    response = client.post("/api/solve", content=content, headers={**kind, "Origin": "http://evil.example"})
    assert "own page" in response.json()["error"]
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 400
    own = client.post("/api/solve", content=content, headers={**kind, "Origin": "http://127.0.0.1:8000"})
    assert "own page" not in own.json()["error"]


@pytest.mark.parametrize(
    "path",
    ["/config.json", "/../config.json", "/%2e%2e/config.json", "/web/page.html", "//etc/passwd", "/api/..%2f..%2fx"],
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert "in_channels" not in response.text


def test_the_page_needs_no_network_and_runs_no_foreign_text(client: TestClient) -> None:
    assert HOSTILE in client.get("/api/model").json()["classes"]
    for path in ("/", "/page.js", "/show.js", "/page.css"):
        response = client.get(path)
        assert response.status_code == 200
        assert "default-src 'none'" in response.headers["content-security-policy"]
        addresses = set(re.findall(r"https?://[^\s\"')]+", response.text))
        assert addresses <= {"http://www.w3.org/2000/svg"}
    script = client.get("/page.js").text + client.get("/show.js").text
    assert "innerHTML" not in script
    assert "document.write" not in script
    names = set(re.findall(r'\$\("([\w-]+)"\)', script))
    assert names <= set(re.findall(r'id="([\w-]+)"', client.get("/").text)) | {"step"}


def test_a_denoiser_makes_large_images_smaller() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 600, 3), dtype=np.uint8)
    for image, channels in ((Image.fromarray(noise), 3), (Image.fromarray(noise[..., 0]), 1)):
        made = shrink_to_limit(image)
        assert made.shape[0] == channels
        assert made.shape[2] == pytest.approx(2 * made.shape[1], abs=1)
        assert made.numel() == pytest.approx(MOST_PIXELS, rel=0.03)
    assert shrink_to_limit(Image.fromarray(noise[:20, :30])).shape == (3, 20, 30)


def test_a_denoiser_shows_before_and_after(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = Denoiser(DenoiserConfig(channels=(1, 2, 4), kernel_size=3)).save(tmp_path / "denoiser")
    client = TestClient(make_app(open_session(folder)), base_url="http://localhost:1")
    assert client.get("/api/model").json()["kind"] == "denoiser"
    assert client.get("/api/model").json()["sigma"] == 25
    photo = url_of(Image.new("RGB", (24, 16), (120, 120, 120)), "JPEG")
    found = client.post("/api/solve", json={"image": photo, "sigma": 25, "strength": 1.0, "tol": 1e-3}).json()
    assert found["minimised"]
    assert found["error"] <= 1e-3
    assert found["before"] != found["after"]
    before, after = found["psnr"]
    assert before < after
    assert client.post("/api/solve", json={"image": photo, "add_noise": False}).json()["psnr"] is None
    model = client.get("/api/model").json()
    assert model["certificate"]["unique"] is True
    assert client.post("/api/certificate", json={"image": photo}).status_code == 404
    wrong = client.post("/api/solve", json={"image": photo, "sigma": -1})
    assert "sigma should lie in" in wrong.json()["error"]
    faint = DenoiserSession(Denoiser(DenoiserConfig((1, 2, 4), 3, most=20 / 255)), "faint")
    assert faint.describe()["sigma"] == 20
    image = Image.new("L", (16, 16), 120)
    assert faint.answer(image)["before"] == faint.answer(image, sigma=faint.model.config.usual_sigma)["before"]


BRANCHES: dict[str, Any] = {"channels": 4, "hidden": [4, 6], "scales": [1, 2], "bound": 0.9}


@pytest.mark.parametrize(
    ("name", "options", "terms"),
    [
        ("opteq-162k", {"channels": 4, "hidden": [5, 6, 5], "injected": [1]}, []),  # it minimises nothing
        ("mopteq-193k", {**BRANCHES, "diversity": 0.01}, ["quadratic", "input", "heritage", "diversity"]),
        ("popteq-193k", BRANCHES, ["quadratic", "coupling", "input"]),
        ("geq-5m", {**BRANCHES, "patch": 2, "split": 2, "projection": 3, "stem_depth": 0}, ["quadratic", "gaussian"]),
    ],
)
def test_every_family_is_shown(name: str, options: dict[str, Any], terms: list[str]) -> None:
    torch.manual_seed(0)
    session = ClassifierSession(models.create(name, num_classes=3, **options), name)
    assert session.describe()["terms"] == terms
    found = session.answer(Image.new("RGB", (32, 32), (200, 30, 90)), factors=dict.fromkeys(terms[-1:], 0.5))
    json.dumps(found, allow_nan=False)
    assert found["steps"][-1]["residual"] < found["steps"][0]["residual"]
    assert (found["steps"][0]["terms"] is None) == (not terms)


def test_models_without_an_equilibrium_are_shown_without_steps(tmp_path: Path) -> None:
    model = models.create("resnet18-cifar", num_classes=3, blocks=[1, 1], width=4)
    client = TestClient(make_app(open_session(model.save_pretrained(tmp_path))), base_url="http://localhost:1")
    found = client.post("/api/solve", json={"image": url_of(Image.new("RGB", (16, 16)))}).json()
    assert found["steps"] == []
    assert found["solve"] is None
    assert len(found["probabilities"]) == 3


def test_the_server_listens_on_this_machine_alone(run: Path) -> None:
    import uvicorn

    listening = bound_socket(0)
    host, port = listening.getsockname()
    assert host == "127.0.0.1"
    with pytest.raises(UserError, match=f"port {port} can't be used"):
        bound_socket(port)
    server = uvicorn.Server(uvicorn.Config(make_app(open_session(run)), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    for _ in range(200):
        if server.started:
            break
        time.sleep(0.05)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/model", timeout=20) as response:
        assert b"opteq-digits" in response.read()
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def test_the_command_refuses_what_is_no_model(tmp_path: Path) -> None:
    refused(call("play", tmp_path), "lacks config.json and model.safetensors")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        torch.manual_seed(0)
        model = models.create("opteq-digits", in_channels=1, channels=4, hidden=[6])
        model.save_pretrained(tmp_path)
        refused(call("play", tmp_path, "--port", str(port), "--no-browser"), f"port {port} can't be used")
