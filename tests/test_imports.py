"""Imports go one way, without circles, and ``import opteq`` brings in nothing that a network does not need."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

import fresh_process
import opteq
import test_extras

SOURCE = Path(opteq.__file__).parent

# From the bottom up: a module imports from lower levels and from its own package, never from above.
LEVELS: list[set[str]] = [
    {"common", "states"},
    {"operators", "penalties", "potentials"},
    {"kernels", "couplings", "regularizers", "solvers"},
    {"problems", "solution"},
    {"gradients"},
    {"diagnostics"},
    {"engine"},
    {"equilibrium", "plot"},
    {"models", "data"},
    {"training", "analysis"},
    {"report"},
    {"inference"},
    {"play"},
    {"opteq", "api"},  # the public names
    {"cli"},
    {"__main__"},
]
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}

# Imports that are forbidden although they go down or stay on one level.
FORBIDDEN = {
    "solvers": {"operators", "penalties", "kernels", "couplings", "regularizers", "problems", "solution"},
    "solution": {"problems"},
    "problems": {"solution"},
    "operators": {"penalties"},
    "penalties": {"operators"},
    "regularizers": {"kernels", "couplings", "solvers"},
    "kernels": {"couplings", "regularizers", "solvers"},
    "couplings": {"kernels", "regularizers", "solvers"},
    "gradients": {"operators", "penalties", "kernels", "couplings", "regularizers"},
    "equilibrium": {"operators", "penalties", "kernels", "couplings", "regularizers"},
}

# What a network needs to run. Everything else is imported where it is used.
HEAVY = {
    "matplotlib", "sklearn", "cvxpy", "torchdeq", "scipy", "typer", "pandas", "torchvision", "tensorboard",
    "accelerate", "kornia", "PIL", "pydantic", "huggingface_hub",
}  # fmt: skip

MODULES = sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """``solvers`` for ``opteq.solvers.linear.cg``; ``opteq`` for itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "opteq"


NAMES = {name_of(path) for path in MODULES}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(body: list[ast.stmt], at_the_top: bool) -> Iterator[ast.stmt]:
    """All statements under these; without those of functions, or with them. Expressions hold no imports."""
    for node in body:
        yield node
        if not (at_the_top and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from statements(getattr(node, field, []), at_the_top)


def imports(path: Path, at_the_top: bool) -> set[str]:
    """The modules of this package that a file imports; only when it is loaded, or at any time."""
    found: set[str] = set()
    for node in statements(parsed(path).body, at_the_top):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "opteq"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: a relative import on line {node.lineno}"
            if node.module and node.module.split(".")[0] == "opteq":
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.add(whole if whole in NAMES else node.module)
    return found


def test_imports_go_down() -> None:
    for path in MODULES:
        module = name_of(path)
        here = package_of(module)
        assert here in LEVEL, f"{here} has no level: give it one in LEVELS"
        for other in imports(path, at_the_top=False):
            there = package_of(other)
            if there == here or other == "opteq.engine":  # its interface imports nothing of the library by itself
                continue
            assert there != "engine", (
                f"{module} imports {other}: outside of the engine only its interface may be imported"
            )
            assert LEVEL[there] <= LEVEL[here], f"{module} imports {other}, which is above it"
            assert there not in FORBIDDEN.get(here, set()), f"{module} imports {other}, which {here} should not import"


def test_there_are_no_circles() -> None:
    graph = {name_of(path): imports(path, at_the_top=True) for path in MODULES}
    finished: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in finished:
            for other in graph[module]:
                visit(other, (*trail, module))
            finished.add(module)

    for module in graph:
        visit(module, ())
    assert len(finished) == len(MODULES)


def test_every_file_says_what_it_is() -> None:
    for path in MODULES:
        assert ast.get_docstring(parsed(path)), f"{name_of(path)} has no docstring"


# One process for all that should not be loaded: what is loaded stays, so that each line also says it of those before.
FRESH = {
    "light": """
import json, sys, torch, opteq
opteq.OptEq
print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))
W = opteq.operators.Conv2d(2, 3, 3, bound=0.9)
opteq.Equilibrium(opteq.OptEq(W, U=torch.nn.Conv2d(1, 3, 3, padding=1)))(torch.randn(2, 1, 4, 4)).sum().backward()
print("torch._dynamo" in sys.modules)
from opteq.data import Augmentation, Batches, Split
split = Split(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4))
augmentation = Augmentation(crop_padding=2, flip=True, erase=0.5, mixup=0.3, cutmix=0.3)
list(Batches(split, (0.5,) * 3, (0.5,) * 3, 2, augmentation=augmentation).epoch(0))
print(sorted({"kornia", "PIL", "sklearn", "pydantic", "rich"} & set(sys.modules)))
import opteq.analysis.branches
print("matplotlib" in sys.modules)
assert all(opteq.models.describe(name).parameters for name in opteq.models.list())
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
""",
    "name 0": "from opteq import Equilibrium, models; print(Equilibrium.__name__, models.__name__)",
    "name 1": "from opteq import *; print(Equilibrium.__name__, models.__name__)",
    # Packages import each other while they are loaded; what is not a name has to be found by the import system.
    "name 2": "import opteq.problems.geq, opteq; print(opteq.Equilibrium.__name__, opteq.models.__name__)",
    "name 3": "from opteq import data; import opteq; print(opteq.Equilibrium.__name__, opteq.models.__name__)",
}


# Importing changes no random numbers; subpackages are attributes.
FRESH["random"] = """
import random, numpy, torch, opteq
def states():
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tolist(), rest, torch.get_rng_state().tolist()
before = states()
import opteq.training, opteq.play  # past the attributes of opteq
print(opteq.data.load.__name__, opteq.solvers.Picard.__name__, opteq.training.__name__, opteq.inference.__name__)
for name in [*dir(opteq), "training", "inference"]:
    getattr(opteq, name)
print(states() == before)
"""


@pytest.fixture(scope="module")
def fresh() -> dict[str, str]:
    """What the codes print in processes of their own."""
    if not hasattr(os, "fork"):
        pytest.skip("a process for each of them would load torch again")
    return fresh_process.run(FRESH | test_extras.codes())


def light(fresh: dict[str, str]) -> list[str]:
    """What is loaded after importing, a layer, batches, branches and the descriptions of models."""
    return fresh["light"].splitlines()


def test_importing_opteq_is_light(fresh: dict[str, str]) -> None:
    assert set(json.loads(light(fresh)[0])) & HEAVY == set()


def test_a_layer_does_not_load_the_compiler_of_torch(fresh: dict[str, str]) -> None:
    """Which takes longer than torch itself; torch's own optimisers load it."""
    assert light(fresh)[1] == "False"


def test_batches_load_only_what_they_need(fresh: dict[str, str]) -> None:
    assert light(fresh)[2] == "[]"


def test_plotting_library_is_loaded_only_to_plot(fresh: dict[str, str]) -> None:
    assert light(fresh)[3] == "False"


def test_describing_models_does_not_load_the_compiler_of_torch(fresh: dict[str, str]) -> None:
    """Nor sympy, which torch loads to draw normal numbers without a device."""
    assert light(fresh)[4] == "[]"


def test_names_are_imported_at_first_use(fresh: dict[str, str]) -> None:
    assert [fresh[f"name {index}"] for index in range(4)] == ["Equilibrium opteq.models"] * 4


def test_subpackages_are_attributes(fresh: dict[str, str]) -> None:
    assert fresh["random"].splitlines()[0].split() == ["load", "Picard", "opteq.training", "opteq.inference"]


def test_the_library_runs_without_extras(fresh: dict[str, str]) -> None:
    found = json.loads(fresh["without extras"])
    assert found["fetch"] == "this needs huggingface_hub, which is not installed: pip install 'opteq[train]'"
    assert found["plot"] == "this needs matplotlib, which is not installed: pip install 'opteq[report]'"
    assert found["compare"] == "this needs rich, which is not installed: pip install 'opteq[cli]'"
    assert found["augment"] == "this needs kornia, which is not installed: pip install 'opteq[train]'"
    assert re.fullmatch(r"this needs \w+, which is not installed: pip install 'opteq\[train\]'", found["train"])
    assert found["main"] == "2 opteq: this needs typer, which is not installed: pip install 'opteq[cli]'\n"


def test_play_and_export_name_their_extras(fresh: dict[str, str]) -> None:
    play, export = fresh["play and export"].splitlines()
    assert play.endswith("pip install 'opteq[play]'")
    assert export.endswith("pip install 'opteq[export]'")


def test_help_does_not_load_torch() -> None:
    code = """
import sys
from opteq.cli import app
try:
    app(["--help"])
except SystemExit as end:
    assert end.code == 0
print("torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=280)
    assert run.stderr == ""
    assert run.stdout.splitlines()[-1] == "False"


def test_the_public_names() -> None:
    assert set(opteq.__all__) <= set(dir(opteq))
    modules = {name for name in opteq.__all__ if f"opteq.{name}" in NAMES}
    assert modules == set(opteq._SUBPACKAGES)
    with pytest.raises(AttributeError, match="module 'opteq' has no attribute 'Equilibrum'"):
        _ = opteq.Equilibrum
    assert not hasattr(opteq, "no_such_name")


@pytest.mark.parametrize(
    "module", [name_of(path) for path in MODULES if path.name == "__init__.py"], ids=lambda name: name
)
def test_public_names_exist(module: str) -> None:
    package = importlib.import_module(module)
    names = getattr(package, "__all__", [])
    assert len(names) == len(set(names))
    for name in names:
        assert hasattr(package, name), f"{module}.__all__ names {name}, which is not there"
        assert not name.startswith("_")


def test_the_names_that_the_design_promises() -> None:
    problems = {"OptEq", "DeepOptEq", "POptEq", "MOptEq", "GEQ", "HiddenProblem", "Branch"}
    solvers = {"Picard", "Anderson", "Broyden", "SAM"}
    gradients = {"Implicit", "Phantom", "OneStep", "Unrolled", "Shine"}
    packages = {"operators", "kernels", "penalties", "regularizers"}
    assert {"Equilibrium"} | problems | solvers | gradients | packages <= set(opteq.__all__)


def test_loading_draws_no_random_numbers(fresh: dict[str, str]) -> None:
    """Who seeds first and touches opteq later should see the same numbers as without it."""
    assert fresh["random"].splitlines()[1] == "True"


def test_a_forward_pass_goes_through_few_files() -> None:
    """On the plain path: a reader should be able to follow it. The engine's interface, which says no, is left out."""
    W = opteq.operators.Conv2d(4, 6, 3, bound=0.9)
    layer = opteq.Equilibrium(opteq.OptEq(W, U=torch.nn.Conv2d(3, 6, 3, padding=1)))
    x = torch.randn(2, 3, 8, 8)
    passed: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCE) and file != SOURCE / "engine" / "__init__.py":
            passed.add(str(file.relative_to(SOURCE)))

    # With autograd, one more: the implicit gradient.
    for tracked, most in ((False, 11), (True, 12)):
        with opteq.engine.off(), torch.set_grad_enabled(tracked):
            layer(x)
            passed.clear()
            sys.setprofile(note)
            try:
                layer(x)
            finally:
                sys.setprofile(None)
        assert 5 < len(passed) <= most, sorted(passed)


def test_folders_and_the_root_stay_small() -> None:
    for folder in {path.parent for path in MODULES}:
        assert len(list(folder.glob("*.py"))) <= 15, folder
    assert len([path for path in SOURCE.glob("*.py") if path.name != "__init__.py"]) <= 8


def test_the_plain_core_stays_small() -> None:
    """From operators to gradients, with the layer, its report and its states; 12,000 lines at most."""
    packages = {
        "operators", "penalties", "potentials", "kernels", "couplings", "regularizers", "problems", "solvers",
        "gradients", "equilibrium", "solution", "states",
    }  # fmt: skip
    core = [path for path in MODULES if package_of(name_of(path)) in packages]
    assert len(core) > 50
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in core) <= 12_000
    engine = [path for path in MODULES if package_of(name_of(path)) == "engine"]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in engine) <= 5_000
