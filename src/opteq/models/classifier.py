"""A classifier with an equilibrium in its middle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from opteq.common.options import NamedOptions
from opteq.equilibrium import Equilibrium
from opteq.models import pretrained


class Classifier(nn.Module, metaclass=NamedOptions):
    """``head(equilibrium(stem(x)))``: from pictures to class scores.

    The three parts are ordinary attributes: any of them can be replaced by another module that takes and gives the
    same shapes. Between stem and equilibrium are pictures ``(B, channels, h, w)``; the equilibrium hands on its
    features, pictures or a tuple with the pictures of every branch.

    Args:
        stem: what carries pictures into the equilibrium's input.
        equilibrium: an :class:`opteq.Equilibrium` or a module that contains some; in a baseline, its residual stages.
        head: from features to scores. ``features`` needs a head with a method ``embed``, which gives what its last
            linear layer sees.
        config: what the model is made from, JSON-able, with the keys ``name``, ``num_classes``, ``in_channels`` and
            ``options``, and ``extra`` for whatever training wants to keep beside the weights (class names, mean and
            standard deviation of pixels).

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
        """Scores ``(B, num_classes)`` of pictures ``(B, in_channels, h, w)``."""
        scores: Tensor = self.head(self._before_head(x))
        return scores

    def features(self, x: Tensor) -> Tensor:
        """What the last linear layer sees, ``(B, F)``."""
        embed: Callable[[Any], Tensor] | None = getattr(self.head, "embed", None)
        if embed is None:
            raise TypeError(
                f"features(x) needs a head with a method embed(features) that gives what its last layer sees; "
                f"{type(self.head).__name__} has none"
            )
        return embed(self._before_head(x))

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write ``config.json`` and ``model.safetensors`` into ``folder``, for :func:`opteq.models.from_pretrained`.

        Each file is written beside the old one and then put in its place, so a write that fails loses nothing.
        """
        return pretrained.save(self, self.config, folder)

    def _before_head(self, x: Tensor) -> Any:
        if x.ndim != 4:
            raise ValueError(f"the input should be pictures (batch, channels, height, width); got {tuple(x.shape)}")
        return self.equilibrium(self.stem(x))


def equilibria(model: nn.Module) -> list[tuple[str, Equilibrium]]:
    """All equilibrium layers of a model with their names in it; none for a baseline.

    ``layer.last`` then holds the reports of its latest call.

    >>> import opteq.models
    >>> [name for name, layer in equilibria(opteq.models.create("opteq-digits", in_channels=1))]
    ['equilibrium']
    """
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Equilibrium)]
