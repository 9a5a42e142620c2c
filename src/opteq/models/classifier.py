"""A classifier with an equilibrium layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from opteq.common.options import NamedOptions
from opteq.equilibrium import Equilibrium
from opteq.models import pretrained


class Classifier(nn.Module, metaclass=NamedOptions):
    """``head(equilibrium(stem(x)))``: from images to logits.

    The three parts are ordinary attributes: each can be replaced by another module with the same shapes. The stem
    returns ``(B, channels, h, w)``; the equilibrium returns its features, a tensor or a tuple with one per branch.

    Args:
        stem: from images to the equilibrium's input.
        equilibrium: an :class:`opteq.Equilibrium` or a module that contains some; in a baseline, its residual stages.
        head: from features to logits. :meth:`features` needs a head with a method ``embed``, which returns the input of
            its last linear layer.
        config: JSON-able, with the keys ``name``, ``num_classes``, ``in_channels`` and ``options``, and ``extra`` for
            metadata of training (class names, mean and std of pixels).

    >>> import torch, opteq.models
    >>> model = opteq.models.create("opteq-digits", in_channels=1)
    >>> model(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, stem: nn.Module, equilibrium: nn.Module, head: nn.Module, config: dict[str, Any]) -> None:
        super().__init__()
        self.stem = stem
        self.equilibrium = equilibrium
        self.head = head
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, num_classes)`` of images ``(B, in_channels, h, w)``."""
        scores: Tensor = self.head(self._before_head(x))
        return scores

    def features(self, x: Tensor) -> Tensor:
        """The input of the last linear layer, ``(B, F)``."""
        embed: Callable[[Any], Tensor] | None = getattr(self.head, "embed", None)
        if embed is None:
            raise TypeError(
                f"features(x) needs a head with a method embed(features) that returns the input of its last layer; "
                f"{type(self.head).__name__} has none"
            )
        return embed(self._before_head(x))

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write ``config.json`` and ``model.safetensors`` into ``folder``, for :func:`opteq.models.from_pretrained`.

        Each file is written beside the old one and then put in its place, so a write that fails loses nothing. Parts
        that were replaced are noted: a configuration does not describe them, so they are given again for loading.
        """
        from opteq.models.registry import described

        known = described(self.config)
        return pretrained.save(self, self.config, folder, [] if known is None else pretrained.replaced(self, known))

    def _before_head(self, x: Tensor) -> Any:
        if x.ndim != 4:
            raise ValueError(f"the input should be images (batch, channels, height, width); got {tuple(x.shape)}")
        return self.equilibrium(self.stem(x))


def equilibria(model: nn.Module) -> list[tuple[str, Equilibrium]]:
    """All equilibrium layers of a model with their names; empty for a baseline.

    ``layer.last`` holds the reports of a layer's latest call.

    >>> import opteq.models
    >>> [name for name, layer in equilibria(opteq.models.create("opteq-digits", in_channels=1))]
    ['equilibrium']
    """
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Equilibrium)]
