"""Saving and loading: bit for bit, atomically, and nothing but two files that can't run code."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import opteq.models
from opteq.common.errors import UserError
from opteq.inference import predict
from opteq.models import Classifier, pretrained
from opteq.models.pretrained import hub

FAMILIES: dict[str, dict[str, Any]] = {
    "opteq-digits": {},
    "opteq-162k": {"channels": 8, "hidden": [6, 8], "injected": [1], "learn_alpha": True},
    "mopteq-0.48m": {"channels": 8, "hidden": [6, 8, 8, 8], "injection_norm": "group"},
    "popteq-193k": {"channels": 8, "hidden": [6, 8, 8], "fusion": "conv"},
    "geq-5m": {"channels": 8, "hidden": [8, 8], "scales": [1, 2], "projection": 6, "injection_norm": "batch"},
    "resnet18-cifar": {"width": 4},
}


def trained(name: str, **options: Any) -> Classifier:
    """A model after a step, so that running statistics and weights are no longer those of a fresh one."""
    torch.manual_seed(0)
    model = opteq.models.create(name, num_classes=4, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    return model.eval()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = trained("opteq-digits")
    model.config["extra"] = {"classes": ["a", "b", "c", "d"], "mean": [0.1, 0.2, 0.3]}
    return model.save_pretrained(tmp_path / "model")


def refused(source: str | Path, *words: str) -> str:
    with pytest.raises(UserError) as refusal:
        opteq.models.from_pretrained(source)
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


# ---- there and back


@pytest.mark.parametrize(("name", "options"), FAMILIES.items(), ids=list(FAMILIES))
def test_a_saved_model_comes_back_bit_for_bit(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = trained(name, **options)
    folder = model.save_pretrained(tmp_path / "deep" / "model")
    assert sorted(contents(folder)) == ["config.json", "model.safetensors"]
    torch.manual_seed(1)
    again = opteq.models.from_pretrained(folder)
    assert not again.training
    assert again.config == model.config
    state = again.state_dict()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key]), key
        assert tensor.dtype == state[key].dtype
    x = torch.randn(3, 3, 8, 8)
    assert torch.equal(again(x), model(x))
    assert torch.equal(again.features(x), model.features(x))
    assert {key for key, p in again.named_parameters() if p.requires_grad} == {k for k, _ in model.named_parameters()}


def test_loading_draws_nothing_at_random(saved: Path) -> None:
    torch.manual_seed(0)
    opteq.models.from_pretrained(saved)
    drawn = torch.rand(())
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(()))


def test_extra_is_kept(saved: Path) -> None:
    model = opteq.models.from_pretrained(str(saved))
    assert model.config["extra"] == {"classes": ["a", "b", "c", "d"], "mean": [0.1, 0.2, 0.3]}


def test_defaults_are_written_down(saved: Path) -> None:
    # A later version may have other defaults: a saved model keeps those that it was made with.
    options = json.loads((saved / "config.json").read_text())["options"]
    assert options == opteq.models.describe("opteq-digits").options


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_precision_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    model = trained("opteq-digits").to(dtype)
    again = opteq.models.from_pretrained(model.save_pretrained(tmp_path))
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    assert torch.equal(again(x), model(x))


def test_channels_last_weights_are_saved(tmp_path: Path) -> None:
    model = trained("opteq-digits")
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    model.to(memory_format=torch.channels_last)
    again = opteq.models.from_pretrained(model.save_pretrained(tmp_path))
    assert torch.equal(again(x), expected)


def test_shared_tensors_are_written_once_and_stay_shared(tmp_path: Path) -> None:
    def tied() -> Classifier:
        model = trained("popteq-193k", **FAMILIES["popteq-193k"])
        first, *others = model.equilibrium.problem.branches
        for branch in others:
            branch.W = first.W if branch.W.weight.shape == first.W.weight.shape else others[0].W
        return model.eval()

    model, other = tied(), tied()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    folder = model.save_pretrained(tmp_path)
    written = load_file(folder / "model.safetensors")
    assert "equilibrium.problem.branches.1.W.weight" in written
    assert "equilibrium.problem.branches.2.W.weight" not in written
    again = opteq.models.from_pretrained(folder, model=other)
    assert again is other
    assert again.equilibrium.problem.branches[1].W is again.equilibrium.problem.branches[2].W
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), model(x))


def test_a_model_with_replaced_parts(tmp_path: Path) -> None:
    model, other = trained("opteq-digits"), trained("opteq-digits")
    for one in (model, other):
        one.stem = nn.Conv2d(3, 16, 1)
    folder = model.save_pretrained(tmp_path)
    refused(folder, "stem of the model was replaced", "from_pretrained(folder, model=yours)")
    again = opteq.models.from_pretrained(folder, model=other)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), model(x))


# ---- writing that fails


def test_files_are_as_readable_as_others(saved: Path) -> None:
    plain = saved / "plain"
    plain.write_text("")
    for name in ("config.json", "model.safetensors"):
        assert stat.S_IMODE((saved / name).stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_loses_nothing(call: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(saved)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(
        UserError,
        match=f"writing the model to {saved} failed: No space left on device .*files that were there are whole",
    ):
        trained("opteq-digits", channels=8).save_pretrained(saved)
    monkeypatch.undo()
    assert contents(saved) == before
    opteq.models.from_pretrained(saved)


def test_a_second_file_that_fails_leaves_the_first_alone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The configuration is written, elsewhere, before the weights take their place.
    before, real, calls = contents(saved), os.fsync, []

    def second_time_full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", second_time_full)
    with pytest.raises(UserError, match="No space left"):
        trained("opteq-digits", channels=8).save_pretrained(saved)
    assert contents(saved) == before


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"writing the model to .*file.*failed: Not a directory.*choose another folder"):
        trained("opteq-digits").save_pretrained(tmp_path / "file" / "model")


def test_a_config_that_json_can_not_hold(tmp_path: Path) -> None:
    model = trained("opteq-digits")
    model.config["extra"]["mean"] = torch.zeros(3)
    with pytest.raises(UserError, match=r"can't be written as JSON.*config\['extra'\]"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


# ---- reading what should not be read


class Bomb:
    """A pickle that leaves a mark when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (Path.touch, (self.mark,))


def test_pickled_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    refused(saved, str(saved), "only as a pickle (pytorch_model.bin)", "convert it to model.safetensors")
    assert not mark.exists()


@pytest.mark.parametrize("writer", ["pickle", "torch"])
def test_a_pickle_in_disguise_is_refused(writer: str, saved: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    weights = saved / "model.safetensors"
    if writer == "pickle":
        weights.write_bytes(pickle.dumps(Bomb(mark)))
    else:
        torch.save({"bomb": Bomb(mark)}, weights)
    refused(saved, str(weights), "is not a whole safetensors file", "fetch or save it again")
    assert not mark.exists()


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_a_truncated_file_is_refused(keep: int, saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    refused(saved, str(weights), "is not a whole safetensors file")


def test_a_header_that_lies_is_refused(saved: Path) -> None:
    weights = saved / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes((2**60).to_bytes(8, "little") + data[8:])
    refused(saved, str(weights), "is not a whole safetensors file")


def altered(folder: Path, change: Any) -> None:
    weights = folder / "model.safetensors"
    tensors: dict[str, Tensor] = load_file(weights)
    change(tensors)
    save_file(tensors, weights)


def test_missing_and_unknown_tensors_are_named(saved: Path) -> None:
    altered(saved, lambda tensors: tensors.pop("head.linear.bias"))
    refused(saved, "lacks 1 (head.linear.bias)")
    altered(saved, lambda tensors: tensors.update(spare=torch.zeros(1)))
    refused(saved, "lacks 1 (head.linear.bias)", "has an unknown 1 (spare)")


def test_a_tensor_of_another_shape_is_named(saved: Path) -> None:
    altered(saved, lambda tensors: tensors.update({"head.linear.bias": torch.zeros(7)}))
    refused(saved, "head.linear.bias has the shape (7,)", "needs (4,)", "do not belong together")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "opteq-digit"}, ["unknown model 'opteq-digit'; did you mean 'opteq-digits'?"]),
        ({"nmae": 1}, ["unknown key 'nmae'; did you mean 'name'?"]),
        ({"options": {"tool": 1e-3}}, ["opteq-digits: unknown option 'tool'"]),
        ({"options": {"tol": "import os"}}, ["tol should be a finite number of at least 0; got 'import os'"]),
        ({"options": []}, ["options should be of type dict; got []"]),
        ({"num_classes": "4"}, ["num_classes should be of type int; got '4'"]),
        ({"num_classes": True}, ["num_classes should be of type int; got True"]),
        ({"num_classes": -1}, ["num_classes should be a whole number of at least 0; got -1"]),
    ],
)
def test_a_wrong_config_is_refused(change: dict[str, Any], words: list[str], saved: Path) -> None:
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(saved, str(path), *words)


def test_a_config_that_asks_for_the_moon_is_refused_before_memory_is_taken(saved: Path) -> None:
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_classes": 10**6}))
    refused(saved, "head.linear.weight has the shape (4, 256)", "needs (1000000, 256)")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_classes": 10**12}, "num_classes should be at most 1048576; got 1000000000000"),
        ({"in_channels": 10**18}, "in_channels should be at most 16384"),
        ({"options": {"stem_depth": 10**7}}, "stem_depth should be at most 256; got 10000000"),
        ({"options": {"hidden": [10**9] * 3}}, "hidden should be at most 16384; got [1000000000, "),
        ({"options": {"hidden": [4] * 10**4}}, "hidden should have at most 256 entries; got 10000"),
        ({"options": {"channels": 10**18}}, "channels should be at most 16384; got 1000000000000000000"),
        ({"options": {"tol": 10**400}}, "tol should be a finite number of at least 0; got 1000000"),
        ({"options": {"channels": 16384, "hidden": [16384], "weight_kernel": 31}}, "has the shape"),
        ({"options": {"weight_kernel": 255}}, "weight_kernel should be at most 31; got 255"),
        ({"name": "resnet18-cifar", "options": {"width": 16384, "blocks": [16] * 8}}, "does not fit"),
        ({"name": "resnet18-cifar", "options": {"blocks": [1] * 60}}, "blocks should have at most 8 entries; got 60"),
    ],
)
def test_a_config_that_asks_for_too_much_is_refused_at_once(change: dict[str, Any], words: str, saved: Path) -> None:
    path = saved / "config.json"
    config = json.loads(path.read_text())
    options = change.get("options", {}) if "name" in change else config["options"] | change.get("options", {})
    path.write_text(json.dumps(config | change | {"options": options}))
    refused(saved, words)


def test_a_model_that_memory_does_not_hold_is_not_made() -> None:
    with pytest.raises(UserError, match=r"opteq-digits: it would have 2.6e\+11 parameters, over 2.1e\+09; make it"):
        opteq.models.create("opteq-digits", channels=16384, hidden=[16384], weight_kernel=31)


@pytest.mark.parametrize("text", ["[" * 10**5, '{"name": ' + "1" * 5000 + "}", '{"a": NaN}'])
def test_hostile_json_is_refused(text: str, saved: Path) -> None:
    (saved / "config.json").write_text(text)
    refused(saved, str(saved / "config.json"))


def test_a_huge_config_is_not_read(saved: Path) -> None:
    with open(saved / "config.json", "ab") as file:
        file.truncate(2**25)
    refused(saved, "has 33554432 bytes, over 16777216")


def test_flipped_bytes_are_noticed(saved: Path) -> None:
    weights = saved / "model.safetensors"
    whole, generator = weights.read_bytes(), random.Random(0)
    for _ in range(60):
        spoilt = bytearray(whole)
        spoilt[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        weights.write_bytes(spoilt)
        refused(saved, str(saved))


@pytest.mark.parametrize("label", ["I32", "U32", "BF16"])
def test_a_tensor_with_another_label_is_refused(label: str, saved: Path) -> None:
    weights = saved / "model.safetensors"
    data = weights.read_bytes()
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    entry = head["head.linear.bias"]
    entry["dtype"] = label
    if label == "BF16":  # half the bytes a number
        entry["shape"] = [2 * entry["shape"][0]]
    text = json.dumps(head).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    refused(saved, "head.linear.bias")


def test_files_of_an_earlier_version_have_no_digest(saved: Path) -> None:
    altered(saved, lambda tensors: tensors.update({"head.linear.bias": torch.ones(4)}))
    assert bool((opteq.models.from_pretrained(saved).head.linear.bias == 1).all())


@pytest.mark.parametrize("part", ["stem", "activation", "solver", "dropout", "kernel"])
def test_a_replaced_part_of_equal_tensors_is_not_forgotten(part: str, tmp_path: Path) -> None:
    """The file would fit the model that the configuration describes, and give other outputs."""

    def changed() -> Classifier:
        model = trained("opteq-digits") if part != "kernel" else trained("geq-5m", **FAMILIES["geq-5m"])
        layer = opteq.models.equilibria(model)[0][1]
        if part == "stem":
            model.stem[0].activation = nn.Tanh()
        elif part == "activation":
            model.equilibrium.problem.penalty = opteq.penalties.get("tanh")
        elif part == "solver":
            model.equilibrium.solver = opteq.Picard(tol=0.5)
        elif part == "dropout":
            model.head.dropout.p = 0.5
        else:
            layer.problem.problems[0].kernel._gamma = 0.7
        return model

    model = changed()
    folder = model.save_pretrained(tmp_path)
    named = {"stem": "stem.0.activation", "activation": "problem.penalty", "kernel": "kernel._gamma"}
    refused(folder, named.get(part, part), "of the model was replaced before it was saved")
    again = opteq.models.from_pretrained(folder, model=changed())
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), model(x))
    assert again.config == model.config


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not valid JSON"), ("[1]", "one JSON object"), ("{}", "lacks name")]
)
def test_a_broken_config_is_refused(text: str, words: str, saved: Path) -> None:
    (saved / "config.json").write_text(text)
    refused(saved, str(saved / "config.json"), words)


def test_a_config_that_is_not_text_is_refused(saved: Path) -> None:
    (saved / "config.json").write_bytes(b"\xff\xfe\x00")
    refused(saved, str(saved / "config.json"), "is not valid JSON")


def test_folders_and_files_that_are_not_there(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "lacks config.json and model.safetensors")
    refused(tmp_path / "nowhere", "there is no folder")
    refused("nowhere", "there is no folder nowhere", "owner/name")
    refused("../no/where", "there is no folder ../no/where")
    refused(saved.parent / "modle", f"there is no folder {saved.parent / 'modle'}; did you mean {saved}?")
    refused(saved / "config.json", "is a file; give the folder")


# ---- the hub


def test_a_misspelt_folder_is_not_looked_for_on_the_hub(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.create_connection", asked)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", asked)
    monkeypatch.chdir(tmp_path)
    os.renames(saved, tmp_path / "runs/digits")
    refused("runs/digit", "there is no folder runs/digit", "there is a folder runs here; did you mean runs/digits?")
    assert "did you mean" not in refused("runs/zzzzzz", "there is no folder runs/zzzzzz, and the hub was not searched")
    refused("./runs/digit", "there is no folder ./runs/digit; did you mean runs/digits?")


def test_a_hub_that_cannot_be_reached_is_not_waited_for(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One attempt; then what was fetched before is used, and otherwise one line says that there is no network."""
    attempts: list[tuple[str, int]] = []

    def unreachable(address: tuple[str, int], timeout: float) -> None:
        attempts.append(address)
        raise OSError(-2, "Name or service not known")

    def fetched_before(repository: str, filename: str, local_files_only: bool = False) -> str:
        assert local_files_only
        if repository != "someone/known":
            raise FileNotFoundError("not in the cache")
        return str(saved / filename)

    monkeypatch.chdir(tmp_path)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.create_connection", unreachable)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetched_before)
    assert opteq.models.from_pretrained("someone/known").config["name"] == "opteq-digits"
    refused("someone/new", "could not be fetched from the hub: huggingface.co can't be reached (Name or service not")
    assert attempts == [("huggingface.co", 443)] * 2
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert hub._why_unreachable() is None
    assert len(attempts) == 2


def test_exactly_two_files_are_fetched_from_the_hub(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def download(repository: str, filename: str) -> str:
        fetched.append((repository, filename))
        return str(saved / filename)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_why_unreachable", lambda: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    model = opteq.models.from_pretrained("someone/digits-v1.0")
    assert fetched == [("someone/digits-v1.0", "config.json"), ("someone/digits-v1.0", "model.safetensors")]
    assert model.config["name"] == "opteq-digits"
    assert predict.load(Path("someone/digits-v1.0"), "cpu").config == model.config  # as the command line gives it


def test_a_local_folder_comes_first(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, filename: str) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.chdir(saved.parent)
    (saved.parent / "someone").mkdir()
    os.rename(saved, saved.parent / "someone" / "digits")
    assert opteq.models.from_pretrained("someone/digits").config["num_classes"] == 4


def test_a_hub_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, filename: str) -> str:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_why_unreachable", lambda: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    refused("someone/digits", "could not be fetched from the hub: no route", "Check the name, the network")


def test_reading_needs_no_pickle() -> None:
    for path in Path(pretrained.__file__).parent.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert "torch.load" not in source
        assert "import pickle" not in source


@pytest.mark.parametrize("key", ["name", "num_classes", "options", "replaced"])
def test_long_values_are_named_in_a_line_of_moderate_length(key: str, saved: Path) -> None:
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: [list(range(1000))]}))
    assert len(refused(saved, str(path))) < 1000
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "x" * 5000}))
    assert len(refused(saved, str(path))) < 1000
