"""``pip install opteq`` without extras: the library runs, and what is missing is named in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomlkit

from opteq.common.errors import MissingExtraError, UserError, needs_extra

PYPROJECT = tomlkit.parse((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")).unwrap()[
    "project"
]
# Where the name of the package to install is not the name to import.
IMPORTED = {"pillow": "PIL"}
# torch itself requires it.
ALWAYS_THERE = {"filelock"}

WITHOUT_EXTRAS = """
import contextlib, io, json, sys, tempfile

from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec

def found(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in BLOCKED else find_spec(name, path, target)

PathFinder.find_spec = classmethod(found)
import torch, opteq

W = opteq.operators.Conv2d(2, 3, 3, bound=0.9)
layer = opteq.Equilibrium(opteq.OptEq(W, U=torch.nn.Conv2d(1, 3, 3, padding=1)))
layer(torch.randn(2, 1, 4, 4)).sum().backward()
assert W.weight.grad is not None

model = opteq.models.create("opteq-digits", num_classes=10, in_channels=1)
import opteq.data
digits = opteq.data.load("digits")
batches = opteq.data.Batches(digits.train, digits.mean, digits.std, 8)
images, labels = next(batches.epoch(0))
torch.nn.functional.cross_entropy(model(images), labels).backward()
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    opteq.models.from_pretrained(folder)
opteq.analysis.objective_terms(model, images)

from opteq.__main__ import main

def fetch():
    opteq.models.from_pretrained("nobody/nothing")

def plot():
    opteq.analysis.branches.plot_perturbations([])

def compare():
    opteq.analysis.compare_gradients(layer, torch.randn(2, 1, 4, 4))

def augment():
    next(opteq.data.Batches(digits.train, digits.mean, digits.std, 8,
                            augmentation=opteq.data.Augmentation(color_jitter=0.1)).epoch(0))

def train():
    import opteq.training

said = {}
for action in (fetch, plot, compare, augment, train):
    try:
        action()
    except ImportError as error:
        said[action.__name__] = str(error)
with contextlib.redirect_stderr(io.StringIO()) as stream:
    try:
        main()
    except SystemExit as end:
        said["main"] = f"{end.code} {stream.getvalue()}"
print(json.dumps(said))
"""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;\s]", requirement)[0] for requirement in requirements}


def test_the_core_is_three_packages() -> None:
    assert names(PYPROJECT["dependencies"]) == {"torch", "numpy", "safetensors"}


def test_all_is_every_extra_of_the_program() -> None:
    assert PYPROJECT["optional-dependencies"]["all"] == ["opteq[train,cli,report,play]"]


PLAY_AND_EXPORT = """
import sys
sys.modules.update(dict.fromkeys(["starlette", "uvicorn", "onnx", "onnxruntime", "onnxscript"]))
import torch, opteq.models
from opteq.inference.export import export
from opteq.common.errors import MissingExtraError
model = opteq.models.create("opteq-digits", in_channels=1, channels=2, hidden=[2])
for action in (lambda: __import__("opteq.play"), lambda: export(model, "m.onnx", "onnx", 2, (1, 8, 8))):
    try:
        action()
    except MissingExtraError as error:
        print(error)
"""


def codes() -> dict[str, str]:
    """Run by tests/test_imports.py, in processes that start from the same one as its own."""
    extras = PYPROJECT["optional-dependencies"]
    packages = names([one for extra in ("train", "cli", "report") for one in extras[extra]]) - ALWAYS_THERE
    blocked = {"sklearn", *(IMPORTED.get(package, package.replace("-", "_")) for package in packages)}
    return {"without extras": f"BLOCKED = {blocked!r}\n{WITHOUT_EXTRAS}", "play and export": PLAY_AND_EXPORT}


def test_a_module_of_our_own_that_is_missing_is_no_extra() -> None:
    with pytest.raises(ModuleNotFoundError), needs_extra("train"):
        import opteq.no_such_module  # type: ignore[import-not-found]  # noqa: F401


def test_a_missing_extra_is_an_import_error_and_one_line() -> None:
    error = MissingExtraError("this needs x")
    assert isinstance(error, ImportError)
    assert isinstance(error, UserError)
    assert error.exit_status == 2
