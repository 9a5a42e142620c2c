"""A classifier with an equilibrium layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from opteq.common.errors import ConvergenceWarning, UserError
from opteq.common.options import NamedOptions
from opteq.equilibrium import Equilibrium
from opteq.models import pretrained

if TYPE_CHECKING:
    from opteq.models.prediction import ImageLike, Prediction


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

    def reset_classifier(self, num_classes: int) -> Classifier:
        """Replace the last layer by a new one for ``num_classes`` classes, 0 for none, and return the model.

        The names of the classes are forgotten. A head of your own is reset by yourself.
        """
        from opteq.models.blocks.parts import last_layer

        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 0:
            raise UserError(f"num_classes should be a whole number of at least 0; got {num_classes!r}")
        name = next((name for name in ("linear", "scores") if hasattr(self.head, name)), None)
        if name is None:
            raise TypeError(f"{type(self.head).__name__} has no last layer called linear or scores; replace model.head")
        old = getattr(self.head, name)
        pixels = isinstance(old, nn.Conv2d) or getattr(old, "pixels", False)
        inputs = old.in_channels if isinstance(old, nn.Conv2d) else old.in_features
        layer = last_layer(inputs, num_classes, pixels).to(next(self.parameters()))
        setattr(self.head, name, layer.train(self.head.training))
        extra = {key: value for key, value in self.config.get("extra", {}).items() if key != "classes"}
        self.config = {**self.config, "num_classes": num_classes, "extra": extra}
        return self

    def push_to_hub(self, repository: str, token: str | None = None, private: bool = False) -> str:
        """Upload the model to ``owner/name`` on the Hugging Face hub, for ``from_pretrained``; returns its address.

        Args:
            repository: made where it does not exist.
            token: of the hub; that of ``huggingface-cli login`` by default.
            private: whether a new repository is hidden from others.
        """
        return pretrained.push(self.save_pretrained, repository, token, private)

    @overload
    def predict(self, image: ImageLike) -> Prediction: ...

    @overload
    def predict(self, image: list[Any] | tuple[Any, ...]) -> list[Prediction]: ...

    @torch.no_grad()
    def predict(self, image: ImageLike | list[Any] | tuple[Any, ...]) -> Prediction | list[Prediction]:
        """The prediction for an image, or for each of a list of them, in evaluation mode.

        Images are prepared as the training images were: size, mean and std are saved with the weights.

        Args:
            image: a file, a Pillow image, a uint8 array ``(h, w)`` or ``(h, w, channels)``, or a uint8 tensor
                ``(channels, h, w)``; or a list of such.

        >>> import opteq.models
        >>> model = opteq.models.create("opteq-digits", in_channels=1)
        >>> len(model.predict(torch.zeros(1, 8, 8, dtype=torch.uint8)).top(3))
        3
        """
        from opteq.models.prediction import Prediction, Preprocessing, stack

        preprocessing = Preprocessing.of(self.config)
        if not preprocessing.classes:
            raise UserError("the model has no classes (num_classes=0): model(x) gives its features")
        images = list(image) if isinstance(image, list | tuple) else [image]
        if not images:
            return []
        weight = next(self.parameters())
        pixels = stack([preprocessing.pixels(one) for one in images]).to(weight.device)
        logits, steps, residuals, converged = self._solved(preprocessing.normalised(pixels).to(weight.dtype))
        if not bool(logits.isfinite().all()):
            row = int((~logits.isfinite().all(dim=1)).nonzero()[0])
            name = images[row] if isinstance(images[row], str | Path) else f"image {row}"
            raise UserError(f"{name}: the model's logits are not finite, so it names no class; look at its weights")
        predictions = [
            Prediction(preprocessing.classes, one, one.softmax(0), int(s), float(r), bool(c))
            for one, s, r, c in zip(logits, steps, residuals, converged, strict=True)
        ]
        return predictions if isinstance(image, list | tuple) else predictions[0]

    def _solved(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits in float32 on the CPU; most steps, largest residual and whether all layers converged, per sample."""
        modes = [(module, module.training) for module in self.modules()]
        try:
            with warnings.catch_warnings():  # the answer says it
                warnings.simplefilter("ignore", ConvergenceWarning)
                logits = self.eval()(x).float().cpu()
        finally:
            for module, mode in modes:
                module.training = mode
        reports = [layer.last[0] for _, layer in equilibria(self) if layer.last is not None]
        if not reports:
            nothing = torch.zeros(len(x))
            return logits, nothing, nothing, nothing == 0
        steps = torch.stack([report.steps.cpu() for report in reports]).amax(dim=0)
        residuals = torch.stack([report.residual.float().cpu() for report in reports]).amax(dim=0)
        return logits, steps, residuals, ~torch.stack([report.failures().cpu() for report in reports]).any(dim=0)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write ``config.json`` and ``model.safetensors`` into ``folder``, for :func:`opteq.models.from_pretrained`.

        Each file is written beside the old one and then put in its place, so a write that fails loses nothing. Parts
        that were replaced are noted: a configuration does not describe them, so they are given again for loading.
        """
        from opteq.models.registry import meta_model

        known = meta_model(self.config)
        return pretrained.save(
            self, self.config, folder, [] if known is None else pretrained.replaced_parts(self, known)
        )

    def _before_head(self, x: Tensor) -> Any:
        if x.ndim != 4:
            raise ValueError(f"the input should be images (batch, channels, height, width); got {tuple(x.shape)}")
        return self.equilibrium(self.stem(x))


class FeatureExtractor(nn.Module):
    """Stem and equilibrium of a model: from images to a list with the features of every branch, ``(B, C, h, w)``.

    Args:
        model: whose parts are used; the head is left out.
    """

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.stem, self.equilibrium = model.stem, model.equilibrium
        self.config = model.config

    def forward(self, x: Tensor) -> list[Tensor]:
        """The features of images ``(B, in_channels, h, w)``."""
        features = self.equilibrium(self.stem(x))
        return list(features) if isinstance(features, tuple) else [features]


def equilibria(model: nn.Module) -> list[tuple[str, Equilibrium]]:
    """All equilibrium layers of a model with their names; empty for a baseline.

    ``layer.last`` holds the reports of a layer's latest call.

    >>> import opteq.models
    >>> [name for name, layer in equilibria(opteq.models.create("opteq-digits", in_channels=1))]
    ['equilibrium']
    """
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Equilibrium)]
