"""Files of a repository on the Hugging Face hub, without a long wait where it can't be reached."""

from __future__ import annotations

import re
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from opteq.common.errors import UserError, needs_extra

PATIENCE = 5.0
"""Seconds that the hub has to answer."""


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


def download(repository: str, *names: str) -> tuple[Path, Path]:
    """Two files of a repository ``owner/name`` on the hub, of which nothing else is fetched."""
    from huggingface_hub import hf_hub_download

    unreachable = _why_unreachable()
    # Files that were downloaded before need no network.
    fetch = partial(hf_hub_download, local_files_only=True) if unreachable else hf_hub_download
    try:
        config, weights = (Path(fetch(repository, name)) for name in names)
    except Exception as error:  # the hub's client has a class for every way to fail, and so has each of its versions
        lines = str(error).strip().splitlines()
        reason = unreachable or (lines[0] if lines else type(error).__name__)
        raise UserError(
            f"there is no folder {repository}, and {' and '.join(names)} of {repository} could not be fetched from "
            f"the hub: {reason}. Check the name, the network and, for a private model, your token"
        ) from error
    return config, weights


def push(save: Callable[[Path], Path], repository: str, token: str | None, private: bool) -> str:
    """Upload the files that ``save(folder)`` writes to ``owner/name`` on the hub; its address."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", repository):
        raise UserError(f"a repository on the hub reads owner/name; got {repository!r}")
    with needs_extra("train"):
        from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        try:
            hub = HfApi(token=token)
            address = hub.create_repo(repository, private=private, exist_ok=True)
            hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload a model of opteq")
        except Exception as error:  # the hub's client has a class for every way to fail
            lines = str(error).strip().splitlines()
            reason = _why_unreachable() or (lines[0] if lines else type(error).__name__)
            raise UserError(
                f"{repository} could not be uploaded to the hub: {reason}. Check the network and your token"
            ) from error
    return str(address)
