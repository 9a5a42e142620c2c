"""What a benchmark ran on, and its figures as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from opteq.common.errors import UserError
from opteq.common.files import write_atomically
from opteq_bench import rivals


def machine(device: torch.device) -> dict[str, Any]:
    """Enough to explain a number later, nothing that is private."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "torchdeq": rivals.version(),
    }


def stamp() -> dict[str, Any]:
    """When, and by which command."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m opteq_bench", *sys.argv[1:]]),
    }


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record so that ``path`` holds the old content or the new, never a part."""
    try:
        write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror or error}; choose another place") from error


def writable(path: Path) -> None:
    """Complain about a path before minutes are spent on what would go there."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--json should be a file in a folder that can be written to; got {path}")


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
