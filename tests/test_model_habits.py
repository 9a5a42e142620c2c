"""What users of other model libraries expect: no classifier, features only, a new classifier, registration, the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from torch import Tensor, nn

import opteq
from opteq import models
from opteq.common.errors import UserError
from opteq.models.blocks.parts import NoClassifier

SMALL: dict[str, dict[str, Any]] = {
    "opteq-digits": {"channels": 4, "hidden": [5], "pool": 2},
    "popteq-193k": {"channels": 4, "hidden": [4, 6], "scales": [1, 2]},
    "resnet18-cifar": {"blocks": [1, 1], "width": 4},
    "opteq-small-imagenet": {
        "extractor_width": 2, "extractor_blocks": [1, 1], "extractor_strides": [1, 2], "channels": 4, "hidden": [4],
        "head_widths": [6],
    },
    "opteq-cityscapes": {
        "extractor_width": 2, "extractor_blocks": [1, 1], "channels": 4, "hidden": [4, 4], "head_width": 6,
    },
}  # fmt: skip


def make(name: str, classes: int = 3, **more: Any) -> models.Classifier:
    torch.manual_seed(0)
    made: models.Classifier = models.create(name, classes, 2, **SMALL[name], **more)
    return made.eval()


def images() -> Tensor:
    return torch.rand(2, 2, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_without_classes_a_model_returns_its_features(name: str) -> None:
    model = make(name, 0)
    features = model.features(images())
    scores = model(images())
    if name == "opteq-cityscapes":  # brought to the size of the image
        assert scores.shape == (2, features.shape[1], 16, 16)
    else:
        torch.testing.assert_close(scores, features)


def test_a_model_without_classes_predicts_none() -> None:
    with pytest.raises(UserError, match="no classes"):
        make("opteq-digits", 0).predict(torch.zeros(2, 8, 8, dtype=torch.uint8))


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_the_classifier_can_be_reset(name: str, tmp_path: Path) -> None:
    model = make(name)
    model.config["extra"] = {"classes": ["a", "b", "c"], "mean": [0.0, 0.0]}
    before = model.features(images())
    assert model.reset_classifier(7) is model
    assert model(images()).shape[1] == 7
    torch.testing.assert_close(model.features(images()), before)
    assert model.config["num_classes"] == 7
    assert model.config["extra"] == {"mean": [0.0, 0.0]}
    loaded = models.from_pretrained(model.save_pretrained(tmp_path))  # as if it had been made so
    torch.testing.assert_close(loaded(images()), model(images()))
    assert isinstance(model.reset_classifier(0).head.get_submodule(last(model)), NoClassifier)
    assert model.reset_classifier(2)(images()).shape[1] == 2


def last(model: models.Classifier) -> str:
    return "scores" if hasattr(model.head, "scores") else "linear"


def test_wrong_numbers_and_heads_of_another_kind_are_refused() -> None:
    model = make("opteq-digits")
    with pytest.raises(UserError, match="at least 0; got -1"):
        model.reset_classifier(-1)
    model.head = nn.Flatten()
    with pytest.raises(TypeError, match=r"replace model\.head"):
        model.reset_classifier(3)


@torch.no_grad()
def test_features_only() -> None:
    extractor = make("popteq-193k", features_only=True)
    found = extractor(images())
    assert [tuple(one.shape) for one in found] == [(2, 4, 16, 16), (2, 4, 8, 8)]
    model = make("popteq-193k")
    for one, expected in zip(found, model.equilibrium(model.stem(images())), strict=True):
        torch.testing.assert_close(one, expected)
    assert not any(name.startswith("head") for name, _ in extractor.named_parameters())


def test_names_are_filtered() -> None:
    assert models.list("geq*") == [name for name in models.list() if name.startswith("geq")]
    assert models.list("no such*") == []


def test_a_model_is_registered_by_its_function_s_name() -> None:
    @models.register_model
    def my_linear(in_channels: int, num_classes: int) -> tuple[nn.Module, nn.Module, nn.Module]:
        """A linear classifier."""
        return nn.Flatten(), nn.Identity(), nn.Linear(4 * in_channels, num_classes)

    try:
        assert models.create("my_linear", 3, 1)(torch.zeros(2, 1, 2, 2)).shape == (2, 3)
        assert models.describe("my_linear").summary == "A linear classifier."
    finally:
        models.unregister_model("my_linear")
    assert isinstance(my_linear(1, 3), tuple)


def test_a_registered_model_is_one_like_the_others(tmp_path: Path) -> None:
    @models.register_model("my-net", summary="mine")
    def my_net(in_channels: int, num_classes: int, width: int = 4, bound: float = 0.9) -> tuple[nn.Module, ...]:
        W = opteq.operators.Conv2d(width, 6, 3, bound=bound)
        layer = opteq.Equilibrium(opteq.OptEq(W, nn.Conv2d(in_channels, 6, 3, padding=1)))
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))
        return nn.Identity(), layer, head

    try:
        model = models.create("my-net", 3, 2, width=5)
        assert models.describe("my-net").options == {"width": 4, "bound": 0.9}
        assert models.describe("my-net").parameters > 0
        loaded = models.from_pretrained(model.save_pretrained(tmp_path))
        torch.testing.assert_close(loaded(images()), model.eval()(images()))
        with pytest.raises(UserError, match="did you mean 'width'"):
            models.create("my-net", widht=3)
        with pytest.raises(UserError, match="width should be a whole number; got 'wide'"):
            models.create("my-net", width="wide")
        with pytest.raises(UserError, match="already"):
            models.register_model("my-net")
    finally:
        models.unregister_model("my-net")
    with pytest.raises(UserError, match="unknown model 'my-net'"):
        models.create("my-net")


def test_functions_that_make_no_models_are_refused() -> None:
    with pytest.raises(UserError, match="num_classes"):
        models.register_model("x")(lambda in_channels: ())  # type: ignore[arg-type, misc]
    with pytest.raises(UserError, match="needs a default"):
        models.register_model("x")(lambda in_channels, num_classes, width: ())  # type: ignore[arg-type, misc]
    with pytest.raises(UserError, match="letters"):
        models.register_model("a b")
    assert "x" not in models.list()


def test_push_to_hub_uploads_what_from_pretrained_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = make("opteq-digits"), {}

    class Hub:
        def __init__(self, token: str | None) -> None:
            seen["token"] = token

        def create_repo(self, name: str, private: bool, exist_ok: bool) -> str:
            seen["repository"] = (name, private)
            return f"hub/{name}"

        def upload_folder(self, repo_id: str, folder_path: str, commit_message: str) -> None:
            seen["files"] = sorted(path.name for path in Path(folder_path).iterdir())
            seen["model"] = models.from_pretrained(folder_path)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert model.push_to_hub("me/digits", token="secret", private=True) == "hub/me/digits"
    assert seen["repository"] == ("me/digits", True)
    assert seen["files"] == ["config.json", "model.safetensors"]
    with torch.no_grad():
        torch.testing.assert_close(seen["model"](images()), model(images()))
    with pytest.raises(UserError, match="owner/name"):
        model.push_to_hub("digits")

    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(Hub, "create_repo", offline)
    monkeypatch.setattr("opteq.models.pretrained.hub._why_unreachable", lambda: None)
    with pytest.raises(UserError, match="could not be uploaded to the hub: no route"):
        model.push_to_hub("me/digits")
