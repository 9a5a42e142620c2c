"""Default folders of data sets and of the cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """``OPTEQ_CACHE``, or ``opteq`` in the platform's folder for caches."""
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
    """The folders in which the data set ``name`` is searched when no root is given, in order.

    ``OPTEQ_DATA``; ``data`` and ``datasets`` in the working directory and in the home directory; Debian's folder for
    data sets. In each, a sub-folder with the data set's name comes before the folder itself.
    """
    places = [Path("data"), Path("datasets"), Path.home() / "data", Path.home() / "datasets"]
    if chosen := os.environ.get("OPTEQ_DATA"):
        places.insert(0, Path(chosen).expanduser())
    places.append(Path("/usr/share/datasets"))
    return [folder for place in places for folder in (place / name, place)]
