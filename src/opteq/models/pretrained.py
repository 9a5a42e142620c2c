"""Weights and configuration on disk: ``config.json`` and ``model.safetensors``, written atomically, never pickled."""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch
from torch import Tensor, nn

from opteq.common.errors import UserError, unknown_name
from opteq.common.files import draft, look_into, sync_folder

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
KEYS = ("name", "num_classes", "in_channels", "options", "extra")

PATIENCE = 5.0
"""Seconds that the hub has to answer."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")


def save(model: nn.Module, config: Mapping[str, Any], folder: str | Path) -> Path:
    """Write both files into ``folder``, which is made where it is missing, and return it.

    Both are complete on the disk, under other names, before either takes its place: a full disk or a crash leaves the
    earlier files as they were. Tensors that are one and the same are written once.
    """
    from safetensors.torch import save as to_bytes

    folder = Path(folder)
    try:
        text = json.dumps(dict(config), indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the model's config can't be written as JSON ({error}); keep plain values in config['extra']"
        ) from error
    tensors = {
        kept: tensor.detach().cpu().contiguous() for kept, tensor in _distinct(model.state_dict(keep_vars=True)).items()
    }
    data = to_bytes(tensors, metadata={"format": "pt"})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with draft(folder / WEIGHTS, data) as weights, draft(folder / CONFIG, text.encode()) as settings:
            os.replace(weights, folder / WEIGHTS)
            os.replace(settings, folder / CONFIG)
        sync_folder(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"could not write the model to {folder}: {reason}. Files that were there are whole; free some space, or "
            "choose a folder that can be written to"
        ) from error
    return folder


def locate(source: str | Path) -> tuple[Path, Path]:
    """The two files of a local folder, or of a repository ``owner/name`` on the hub, fetched if need be."""
    folder = Path(source)
    look_into(folder)
    if folder.is_dir():
        return _in_folder(folder)
    if folder.exists():
        raise UserError(f"{folder} is a file; give the folder that holds {CONFIG} and {WEIGHTS}")
    if not isinstance(source, str) or not _HUB_ID.fullmatch(source):
        otherwise = ", and it is no name on the hub either, which reads owner/name"
        raise UserError(f"there is no folder {source}{_nearest(folder) or otherwise}")
    if folder.parent.is_dir():
        # Who keeps models in runs/ and misspells one should not wait for the hub to say that it has no such owner.
        raise UserError(
            f"there is no folder {source}, and the hub was not asked, since there is a folder {folder.parent} here"
            f"{_nearest(folder)}"
        )
    return _from_hub(source)


def read_config(path: Path) -> dict[str, Any]:
    """The configuration, with its keys and their types checked."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"could not read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); save the model again with save_pretrained") from error
    if not isinstance(config, dict):
        raise UserError(
            f"{path} should hold one JSON object with the keys {', '.join(KEYS)}; got {type(config).__name__}"
        )
    for key in config:
        if key not in KEYS:
            raise UserError(f"{path}: {unknown_name('key', key, KEYS)}")
    missing = [key for key in KEYS[:3] if key not in config]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; save the model again with save_pretrained")
    for key, kind in (("name", str), ("num_classes", int), ("in_channels", int), ("options", dict), ("extra", dict)):
        value = config.setdefault(key, {})
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{path}: {key} should be of type {kind.__name__}; got {value!r}")
    return config


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Nothing in such a file can run; anything else is refused."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{path} is not a whole safetensors file ({error}): it is damaged, or something else in disguise. "
            "Nothing of it was used; fetch or save it again"
        ) from error


def load(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Put ``tensors`` into ``model``, all of them and nothing but them; ``path`` is for messages.

    A model on the meta device, which has shapes and no memory, gets its memory here, after names and shapes were found
    to fit: a configuration that asks for a billion classes is refused before anything is allocated.
    """
    own = _distinct(model.state_dict(keep_vars=True))
    _same_names(path, set(own), set(tensors))
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise UserError(
                f"{path}: {name} has the shape {tuple(tensors[name].shape)}, but the model that {CONFIG} describes "
                f"needs {tuple(tensor.shape)}; the two files do not belong together"
            )
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(kinds) == 1:  # a model that was saved in another precision comes back in it
        model.to(dtype=kinds.pop())
    if any(tensor.is_meta for tensor in own.values()):
        model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in _distinct(model.state_dict(keep_vars=True)).items():
            tensor.copy_(tensors[name])


def _same_names(path: Path, wanted: set[str], found: set[str]) -> None:
    problems = [
        f"{word} {len(names)} ({', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''})"
        for word, names in (("lacks", wanted - found), ("has an unknown", found - wanted))
        if names
    ]
    if problems:
        raise UserError(
            f"{path} does not fit the model that {CONFIG} describes: of its tensors it {' and it '.join(problems)}. "
            "A model whose parts were replaced is loaded with from_pretrained(folder, model=yours)"
        )


def _distinct(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of names that stand for one tensor, the first."""
    seen: set[int] = set()
    distinct = {}
    for name, tensor in state.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            distinct[name] = tensor
    return distinct


def _in_folder(folder: Path) -> tuple[Path, Path]:
    config, weights = folder / CONFIG, folder / WEIGHTS
    missing = [path.name for path in (config, weights) if not path.is_file()]
    if not missing:
        return config, weights
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if WEIGHTS in missing and pickles:
        raise UserError(
            f"{folder} has weights only as a pickle ({pickles[0]}), which could run code when it is read, so it was "
            f"left alone; convert it to {WEIGHTS} where you trust it"
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


def _why_unreachable() -> str | None:
    """Why the hub can't be reached, or None if it can.

    The hub's client tries again for half a minute before it says so. Behind a proxy it is left to find out by itself.
    """
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    host, port = address.hostname or "", address.port or (443 if address.scheme == "https" else 80)
    if constants.HF_HUB_OFFLINE or (address.scheme in getproxies() and not proxy_bypass(host)):
        return None
    try:
        socket.create_connection((host, port), PATIENCE).close()
    except OSError as error:
        return f"{host} can't be reached ({error.strerror or error})"
    return None


def _from_hub(repository: str) -> tuple[Path, Path]:
    from huggingface_hub import hf_hub_download

    unreachable = _why_unreachable()
    # What was fetched before can be had without the network.
    fetch = partial(hf_hub_download, local_files_only=True) if unreachable else hf_hub_download
    try:
        config, weights = (Path(fetch(repository, name)) for name in (CONFIG, WEIGHTS))
    except Exception as error:  # the hub's client has a class for every way to fail, and so has each of its versions
        said = str(error).strip().splitlines()
        reason = unreachable or (said[0] if said else type(error).__name__)
        raise UserError(
            f"there is no folder {repository}, and {CONFIG} and {WEIGHTS} of {repository} could not be fetched from "
            f"the hub: {reason}. Check the name, the network and, for a private model, your token"
        ) from error
    return config, weights
