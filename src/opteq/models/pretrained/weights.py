"""The tensors of a model in a safetensors file that knows its own digest.

The digest covers names, dtypes, shapes and bytes of all tensors. It is in the file itself, not beside it: a process
that is killed between the writing of two files leaves each of them whole.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opteq.common.errors import UserError

DIGEST = "sha256"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def to_bytes(model: nn.Module) -> bytes:
    """The file for the tensors of ``model``, with their digest in its head."""
    from safetensors.torch import save

    own = _distinct(model.state_dict(keep_vars=True))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()}
    # One entry: safetensors writes several in an order that changes from process to process.
    return save(tensors, metadata={DIGEST: digest(tensors)})


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes, in the order of the names."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def load(model: nn.Module, path: Path) -> None:
    """Put the tensors of the file ``path`` into ``model``, all of them and nothing but them.

    Names, shapes and dtypes are compared with the file's head before anything is read. A model on the meta device,
    which has shapes and no memory, gets its memory here, afterwards: a configuration that asks for a billion classes is
    refused before anything is allocated.
    """
    own = _distinct(model.state_dict(keep_vars=True))
    head, expected = _read_head(path)
    _same_names(path, set(own), set(head))
    for name, tensor in own.items():
        dtype, shape = head[name]
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{path}: {name} has the shape {shape}, but the model that config.json describes needs "
                f"{tuple(tensor.shape)}; the two files do not belong together"
            )
        known = _DTYPES.get(dtype)
        if known is None or (known != tensor.dtype and not (known.is_floating_point and tensor.is_floating_point())):
            raise UserError(f"{path}: {name} is stored as {dtype}, but the model needs {tensor.dtype}; it is damaged")
    tensors = _read(path)
    if expected is not None and digest(tensors) != expected:
        raise UserError(
            f"{path} is damaged: its tensors are not those that were saved (their SHA-256 differs). Nothing of it was "
            "used; fetch or save it again"
        )
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(kinds) == 1:  # a model that was saved in another precision comes back in it
        model.to(dtype=kinds.pop())
    if any(tensor.is_meta for tensor in own.values()):
        model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in _distinct(model.state_dict(keep_vars=True)).items():
            tensor.copy_(tensors[name])


def _read_head(path: Path) -> tuple[dict[str, tuple[str, tuple[int, ...]]], str | None]:
    """Of every tensor its dtype and shape; and the digest, where there is one."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices: dict[str, Any] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            head = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
            return head, (file.metadata() or {}).get(DIGEST)
    except Exception as error:
        raise _incomplete(path, error) from error


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors. Nothing in such a file can run; anything else is refused."""
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception as error:
        raise _incomplete(path, error) from error


def _incomplete(path: Path, error: Exception) -> UserError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return UserError(
        f"{path} is not a whole safetensors file ({reason}): it is damaged, or something else in disguise. "
        "Nothing of it was used; fetch or save it again"
    )


def _same_names(path: Path, wanted: set[str], stored: set[str]) -> None:
    problems = [
        f"{word} {len(names)} ({', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''})"
        for word, names in (("lacks", wanted - stored), ("has an unknown", stored - wanted))
        if names
    ]
    if problems:
        raise UserError(
            f"{path} does not fit the model that config.json describes: of its tensors it {' and it '.join(problems)}. "
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
