"""Where data and the cache are, unless the caller says otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """``OPTEQ_CACHE``; or ``opteq`` in the folder that this platform keeps for a user's caches."""
    if chosen := os.environ.get("OPTEQ_CACHE"):
        return Path(chosen).expanduser()
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen).expanduser() / "opteq"
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "opteq"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / "opteq" / "Cache"
    return home / ".cache" / "opteq"


def data_folders(name: str) -> list[Path]:
    """Where to look for the data set ``name`` when no root is given, in this order.

    ``OPTEQ_DATA`` first; then ``data`` and ``datasets`` here and at home; last where Debian's packages put data sets.
    In each, a folder called after the data set comes before the place itself.
    """
    places = [Path("data"), Path("datasets"), Path.home() / "data", Path.home() / "datasets"]
    if chosen := os.environ.get("OPTEQ_DATA"):
        places.insert(0, Path(chosen).expanduser())
    places.append(Path("/usr/share/datasets"))
    return [folder for place in places for folder in (place / name, place)]
