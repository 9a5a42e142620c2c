"""Everything that a run must remember, as tensors and JSON."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from opteq.common.errors import UserError
from opteq.training.devices import Accelerator, gather_object
from opteq.training.run import rng


def pack(
    model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights, optimiser, loss scale and every process's sources of chance. All processes have to call this."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    # Buffers that a state_dict leaves out are part of the computation all the same.
    tensors |= {f"buffer.{name}": value for name, value in _unsaved_buffers(model).items()}
    values: dict[str, Any] = {"optimizer": {}, "processes": accelerator.num_processes}
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            name = f"{index}.{key}"
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}"] = value
            else:
                values["optimizer"][name] = value
    if accelerator.scaler is not None:
        values["scaler"] = accelerator.scaler.state_dict()
    own = rng.capture()
    everyones = gather_object([own]) if accelerator.num_processes > 1 else [own]
    values["rng"] = [chance for _, chance in everyones]
    for rank, (states, _) in enumerate(everyones):
        tensors |= {f"rng.{rank}.{name}": value for name, value in states.items()}
    return tensors, values


def unpack(
    tensors: dict[str, Tensor],
    values: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
) -> None:
    """Return to a packed state. With another number of processes chance goes on from the seed instead."""
    try:
        model.load_state_dict(_under("model.", tensors))
    except RuntimeError as error:
        first = " ".join(str(error).split())[:300]
        raise UserError(f"the checkpoint does not fit the model that the recipe describes: {first}") from error
    for name, buffer in _unsaved_buffers(model).items():
        buffer.copy_(tensors[f"buffer.{name}"])
    entries: dict[int, dict[str, Any]] = {}
    for name, value in {**_under("optimizer.", tensors), **values["optimizer"]}.items():
        index, _, key = name.partition(".")
        entries.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": entries, "param_groups": groups})
    _lay_out(optimizer)
    if accelerator.scaler is not None and "scaler" in values:
        accelerator.scaler.load_state_dict(values["scaler"])
    if values["processes"] == accelerator.num_processes:
        rank = accelerator.process_index
        rng.restore(_under(f"rng.{rank}.", tensors), values["rng"][rank])


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give momenta and the like the memory layout of their weights: fused updates insist on it, and files have none."""
    for weight, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.shape == weight.shape and value.stride() != weight.stride():
                entries[key] = torch.empty_like(weight, dtype=value.dtype).copy_(value)


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict().keys()
    return {name: value for name, value in model.named_buffers() if name not in saved}


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
