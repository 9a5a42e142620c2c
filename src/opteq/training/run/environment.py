"""What a run ran on: enough to explain a number later, nothing that is private."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

import torch

from opteq.training.devices import Accelerator

_PACKAGES = ("opteq", "torch", "accelerate", "safetensors", "kornia", "numpy")


def describe(accelerator: Accelerator) -> dict[str, Any]:
    """Versions, machine, devices and command of this process."""
    device = accelerator.device
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cuda": torch.version.cuda,
        "processes": accelerator.num_processes,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
