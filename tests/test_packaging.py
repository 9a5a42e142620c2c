"""The wheel and the sdist: they pass the registry's checks, and what is installed from them runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import opteq

ROOT = Path(__file__).parents[1]
MOST_BYTES = 5_000_000

TRIED = """
import sys, torch, opteq
from opteq import data, models
assert {folder!r} in opteq.__file__, opteq.__file__
digits = data.load("digits")
images = list(digits.test.images[:8])
found = models.from_pretrained("digits").predict(images)
assert [one.index for one in found] == digits.test.labels[:8].tolist()
from opteq.training import load_recipe
assert load_recipe("digits").name == "digits"
from importlib import resources
for part, name in (("play", "page.html"), ("play", "show.js"), ("report", "page.html")):
    assert resources.files(f"opteq.{{part}}").joinpath("web", name).is_file(), name
print(opteq.__version__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    for tool in ("build", "hatchling", "twine"):
        pytest.importorskip(tool, reason=f"{tool} is not installed; pip install 'opteq[test]'")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, folder.iterdir()))
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": source}


def run(*command: str, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if cwd is None or name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_into_a_fresh_environment(built: dict[str, Path], kind: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    site = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    # Torch and the rest of this environment come after what is installed here, so that it takes seconds.
    (site / "zz-rest.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    quick = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--ignore-installed"]
    run(sys.executable, "-m", "pip", "--python", str(python), "install", *quick, str(built[kind]))
    printed = run(str(python), "-W", "error", "-c", TRIED.format(folder=str(site)), cwd=tmp_path)
    assert printed.strip() == opteq.__version__
    command = tmp_path / "env" / "bin" / "opteq"
    assert run(str(command), "--version", cwd=tmp_path).strip() == f"opteq {opteq.__version__}"
    assert "digits" in run(str(command), "recipes", cwd=tmp_path)


@pytest.mark.slow
def test_they_hold_what_they_should(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = wheel.namelist()
        (metadata,) = (wheel.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert {name.split("/")[0] for name in names} == {"opteq", f"opteq-{opteq.__version__}.dist-info"}
    assert "opteq/py.typed" in names
    assert not any("__pycache__" in name for name in names)
    assert metadata.count("Classifier: ") > 10
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert sorted(re.findall(r"Requires-Dist: (\w+)", "\n".join(required))) == ["numpy", "safetensors", "torch"]
    with tarfile.open(built["sdist"]) as source:
        inside = {name.partition("/")[2] for name in source.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "tests/test_packaging.py"} <= inside
    assert max(path.stat().st_size for path in built.values()) < MOST_BYTES
