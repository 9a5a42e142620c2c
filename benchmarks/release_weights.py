"""Weights of finished runs as files for a release: one zip a run, the same bytes for the same run, and their checksums.

A zip holds what :func:`opteq.models.from_pretrained` reads, the recipe that the run was made with, and its metrics.
Prints a table with the checksums, for the page that reports the runs.

    python benchmarks/release_weights.py runs/popteq-193k runs/mopteq-193k --out dist/weights
    unzip dist/weights/popteq-193k.zip -d popteq-193k
    python -c "import opteq.models; opteq.models.from_pretrained('popteq-193k')"
"""

from __future__ import annotations

import argparse
import hashlib
import zipfile
from pathlib import Path

from opteq.models import from_pretrained
from runs_page import recipe_without_places  # beside this file

LARGEST = 10 * 2**20  # what a release should carry for a small model
NEEDED, WELCOME = ("config.json", "model.safetensors", "recipe.toml"), ("metrics.jsonl", "evaluation.json")
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can say: times would make equal runs differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of finished runs")
    parser.add_argument("--out", type=Path, default=Path("dist/weights"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print("| file | bytes | SHA-256 |\n|---|---|---|")
    for run in options.runs:
        path = pack(run, options.out)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"| {path.name} | {path.stat().st_size:,} | `{digest}` |")


def pack(run: Path, folder: Path) -> Path:
    """The zip of one run; refused where something is missing, unreadable or too large."""
    missing = [name for name in NEEDED if not (run / name).exists()]
    if missing:
        raise SystemExit(f"{run} is no finished run: it has no {' and no '.join(missing)}")
    from_pretrained(run)  # what can't be read should not be released
    path = folder / f"{run.resolve().name}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in (*NEEDED, *WELCOME):
            if (run / name).exists():
                archive.writestr(zipfile.ZipInfo(name, LONG_AGO), content(run / name), zipfile.ZIP_DEFLATED)
    if path.stat().st_size > LARGEST:
        size = path.stat().st_size
        path.unlink()
        raise SystemExit(f"{run}: {size:,} bytes are above {LARGEST:,}; only small models belong into a release")
    return path


def content(path: Path) -> bytes:
    return recipe_without_places(path.parent).encode() if path.name == "recipe.toml" else path.read_bytes()


if __name__ == "__main__":
    main()
