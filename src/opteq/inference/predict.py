"""``opteq predict``: a trained classifier on image files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opteq import models
from opteq.common.errors import UserError
from opteq.common.files import check_readable
from opteq.data.readers.folder import ENDINGS, visible
from opteq.inference.devices import resolve_device
from opteq.models import Classifier, Segmenter
from opteq.models.prediction import Prediction

if TYPE_CHECKING:
    from rich.console import Console

MOST_EXPLAINED = 24
"""Images of a page with explanations: each has a card with several images and charts."""

BATCH = 64
"""Images per solve: enough to use a device well, few enough for its memory."""


def load(run: Path, device: str = "auto") -> Classifier:
    """The classifier of a finished run, of a folder that ``save_pretrained`` wrote, or of ``owner/name`` on the hub."""
    check_finished(run)
    place = resolve_device(device)
    model = models.from_pretrained(str(run))
    if isinstance(model, Segmenter):
        raise UserError(f"{run} holds a model for segmentation; use model.predict(image) in Python for its label maps")
    return model.to(place)


def check_finished(run: Path) -> None:
    """Raise where a folder holds a run without weights."""
    check_readable(run)
    if run.is_dir() and (run / "recipe.toml").exists() and not (run / "model.safetensors").exists():
        from opteq.training.run.folder import RunFolder  # a saved model needs nothing of training

        RunFolder(run).check_finished()


def find_images(paths: Sequence[Path]) -> list[Path]:
    """The files among ``paths`` and those in the folders among them, folder by folder in the order of their names."""
    return [image for path in paths for image in _images_of(path)]


def _images_of(path: Path) -> list[Path]:
    check_readable(path.parent)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"there is no image or folder {path}")
    images = sorted(
        one for one in path.rglob("*") if visible(one.name) and one.suffix.lower() in ENDINGS and one.is_file()
    )
    if not images:
        raise UserError(f"{path} holds no images ({', '.join(ending[1:] for ending in ENDINGS)})")
    return images


def predict_files(model: Classifier, files: Sequence[Path]) -> Iterator[tuple[Path, Prediction]]:
    """The prediction of every file, in order."""
    # Without a saved size the images may differ in theirs, and are solved one by one.
    size = BATCH if model.config["extra"].get("image_shape") else 1
    for start in range(0, len(files), size):
        chunk = files[start : start + size]
        yield from zip(chunk, model.predict(list(chunk)), strict=True)


def as_dict(file: Path, prediction: Prediction, top: int) -> dict[str, Any]:
    """A prediction for JSON."""
    return {
        "image": str(file),
        "class": prediction.label,
        "probability": prediction.confidence,
        "top": [{"class": name, "probability": share} for name, share in prediction.top(top)],
        "solver_steps": prediction.steps,
        "residual": prediction.residual,
        "converged": prediction.converged,
    }


def command(
    run: Path,
    images: Sequence[Path],
    top: int,
    as_json: bool,
    explain: Path | None,
    device: str,
    console: Console,
) -> None:
    """Run ``opteq predict``."""
    files = find_images(images)
    if explain is not None and len(files) > MOST_EXPLAINED:
        raise UserError(f"--explain takes at most {MOST_EXPLAINED} images; got {len(files)}")
    if explain is not None and not explain.parent.is_dir():
        raise UserError(f"--explain {explain}: there is no folder {explain.parent}")
    model = load(run, device)
    predictions = list(predict_files(model, files))
    if explain is not None:
        from opteq.report.explanation import write_explanation

        write_explanation(model, list(files), [file.name for file in files], explain, run.resolve().name)
    if as_json:
        # One object for one file, a list for anything else: what comes out depends on what was asked for alone.
        objects = [as_dict(file, prediction, top) for file, prediction in predictions]
        single = len(images) == 1 and images[0].is_file()
        print(json.dumps(objects[0] if single else objects, indent=2, ensure_ascii=False))
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("image", "class", "probability", "other classes")
    table.columns[2].justify = "right"
    for file, prediction in predictions:
        (label, share), *others = prediction.top(top)
        doubt = "" if prediction.converged else f" (not converged, residual {prediction.residual:.0e})"
        rest = ", ".join(f"{name} {p:.1%}" for name, p in others)
        table.add_row(escape(str(file)), escape(label), f"{share:.1%}", escape(rest + doubt))
    console.print(table)
    if explain is not None:
        console.print(f"open {explain} in a browser", markup=False, soft_wrap=True)
