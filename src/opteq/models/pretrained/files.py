"""Weights and configuration on disk: ``config.json`` and ``model.safetensors``, written atomically, never pickled."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from opteq.common.errors import UserError, format_value, unknown_name
from opteq.common.files import check_readable, draft, plain_errors, sync_folder
from opteq.models.pretrained.hub import download
from opteq.models.pretrained.released import released, released_folder
from opteq.models.pretrained.weights import to_bytes

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
KEYS = ("name", "num_classes", "in_channels", "options", "extra", "replaced")

_LARGEST_CONFIG = 2**24  # bytes
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


def save(model: nn.Module, config: Mapping[str, Any], folder: str | Path, replaced: Sequence[str] = ()) -> Path:
    """Write both files into ``folder``, which is made where it is missing, and return it.

    Both are complete on the disk, under other names, before either takes its place: a full disk or a crash leaves the
    earlier files as they were. Tensors that are one and the same are written once. ``replaced`` names what the
    configuration does not describe.
    """
    folder = Path(folder)
    noted = {"replaced": list(replaced)} if replaced else {}
    try:
        text = json.dumps({**config, **noted}, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the model's config can't be written as JSON ({error}); keep plain values in config['extra']"
        ) from error
    data = to_bytes(model)
    with plain_errors(f"writing the model to {folder}", "or choose another folder: files that were there are whole"):
        folder.mkdir(parents=True, exist_ok=True)
        with draft(folder / WEIGHTS, data) as weights, draft(folder / CONFIG, text.encode()) as settings:
            os.replace(weights, folder / WEIGHTS)
            os.replace(settings, folder / CONFIG)
        sync_folder(folder)
    return folder


def locate(source: str | Path) -> tuple[Path, Path]:
    """The two files of a local folder, of weights in the package, or of ``owner/name`` on the hub, fetched at need."""
    folder = released_folder(source)
    check_readable(folder)
    if folder.is_dir():
        return _in_folder(folder)
    if folder.exists():
        raise UserError(f"{folder} is a file; give the folder that holds {CONFIG} and {WEIGHTS}")
    if not isinstance(source, str) or not _HUB_ID.fullmatch(source):
        names = ", ".join(one.name for one in released())
        hub = ", and no name on the hub, which reads owner/name" if isinstance(source, str) else ""
        otherwise = f"{',' if hub else ' and'} no weights of that name in the package ({names}){hub}"
        raise UserError(f"there is no folder {source}{_nearest(folder) or otherwise}")
    if folder.parent.is_dir():
        # A misspelt folder below an existing one is no repository: the hub is not searched for it.
        raise UserError(
            f"there is no folder {source}, and the hub was not searched, since there is a folder {folder.parent} here"
            f"{_nearest(folder)}"
        )
    return download(source, CONFIG, WEIGHTS)


def read_config(path: Path) -> dict[str, Any]:
    """The configuration, with its keys and their types checked."""
    try:
        size = path.stat().st_size
        if size > _LARGEST_CONFIG:
            raise UserError(f"{path} has {size} bytes, over {_LARGEST_CONFIG}: it is no configuration of a model")
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"could not read {path}: {error.strerror or error}") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); save the model again with save_pretrained") from error
    if not isinstance(config, dict):
        raise UserError(
            f"{path} should hold one JSON object with the keys {', '.join(KEYS)}; got {type(config).__name__}"
        )
    if "denoiser" in config:
        raise UserError(f"{path.parent} holds a denoiser; `opteq restore` and models.Denoiser.load use it")
    for key in config:
        if key not in KEYS:
            raise UserError(f"{path}: {unknown_name('key', key, KEYS)}")
    missing = [key for key in KEYS[:3] if key not in config]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; save the model again with save_pretrained")
    replaced = config.setdefault("replaced", [])
    if not isinstance(replaced, list) or not all(isinstance(part, str) for part in replaced):
        raise UserError(f"{path}: replaced should be a list of names of parts; got {format_value(replaced)}")
    for key, kind in (("name", str), ("num_classes", int), ("in_channels", int), ("options", dict), ("extra", dict)):
        value = config.setdefault(key, {})
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{path}: {key} should be of type {kind.__name__}; got {format_value(value)}")
    return config


def _in_folder(folder: Path) -> tuple[Path, Path]:
    config, weights = folder / CONFIG, folder / WEIGHTS
    missing = [path.name for path in (config, weights) if not path.is_file()]
    if not missing:
        return config, weights
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if WEIGHTS in missing and pickles:
        raise UserError(
            f"{folder} has weights only as a pickle ({pickles[0]}), which could run code when it is read, so it was "
            f"not read; convert it to {WEIGHTS} where you trust it"
        )
    raise UserError(f"{folder} lacks {' and '.join(missing)}; a model's folder holds {CONFIG} and {WEIGHTS}")


def _nearest(folder: Path) -> str:
    """A hint for a folder that is not there: the one beside which it would be that is called most like it."""
    try:
        beside = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
    except OSError:
        return ""
    close = difflib.get_close_matches(folder.name, beside, n=1, cutoff=0.5)
    return f"; did you mean {folder.parent / close[0]}?" if close else ""
