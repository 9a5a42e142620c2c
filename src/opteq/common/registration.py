"""A module that registers what lies inside the options it holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from opteq.common.options import NamedOptions


class HoldsOptions(nn.Module):
    """A module some of whose attributes are plain options that may hold modules themselves.

    A learned prior may lie inside an envelope, or inside a solver that selects by it. Its parameters are those of the
    module that holds them all, or no optimiser would see them. The name is the attribute's with those on the way:
    ``regularizer_regularizer`` for the prior inside the envelope ``regularizer``.

    A parameter that lies there without a module around it is refused: no optimiser would see it.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_parameters(value, name)
        for place, _ in _modules_inside(self.__dict__.get(name)):
            del self._modules[f"{name}_{place}"]
        super().__setattr__(name, value)
        for place, module in _modules_inside(value):
            self.add_module(f"{name}_{place}", module)


def _refuse_parameters(value: object, name: str) -> None:
    if isinstance(value, nn.Module) or not isinstance(type(value), NamedOptions):
        return
    for place, held in getattr(value, "__dict__", {}).items():
        if isinstance(held, Tensor) and held.requires_grad:
            kind = type(value).__name__
            raise TypeError(
                f"{name} holds {place}, which requires gradients, but {kind} is no module, so no optimiser would see "
                f"it; derive {kind} from torch.nn.Module as well: class {kind}(nn.Module, "
                f"{type(value).__mro__[1].__name__})"
            )
        _refuse_parameters(held, f"{name}.{place}")


def _modules_inside(value: object) -> list[tuple[str, nn.Module]]:
    """The modules that options hold, by the names of the attributes on the way; none for a module, which holds them."""
    if isinstance(value, nn.Module) or not isinstance(type(value), NamedOptions):
        return []
    modules = []
    for name, held in getattr(value, "__dict__", {}).items():
        if isinstance(held, nn.Module):
            modules.append((name, held))
        modules += [(f"{name}_{place}", module) for place, module in _modules_inside(held)]
    return modules
