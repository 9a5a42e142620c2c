"""The registry of models: create, describe, load and register them by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Literal, overload

import torch

from opteq.common.errors import UserError, needs_extra, unknown_name
from opteq.models import pretrained, segmenter
from opteq.models.blocks.parts import Parts
from opteq.models.checks import whole
from opteq.models.classifier import Classifier, FeatureExtractor, equilibria
from opteq.models.custom import Builder, builder_of, options_of
from opteq.models.meta_device import on_meta_device
from opteq.models.table import MODELS, Entry

MOST_PARAMETERS = 2**31
MOST_CLASSES = 2**20


@dataclass(frozen=True)
class ModelCard:
    """Description of a model.

    Attributes:
        name: for :func:`create`.
        parameters: number of parameters for ``classes`` classes of color images.
        classes: number of classes of the published result; ten where there is none.
        family: opteq, mopteq, popteq, geq, inhibition, comparator or baseline.
        dense: whether it is for segmentation.
        summary: one line.
        reproduces: the published result; empty where there is none.
        options: all options with their defaults.
        explanations: one line about each option.
        shares: the shares of the parameters in stem, equilibrium (``body`` in a model without one) and head.
        weights: names of weights in the package, for :func:`from_pretrained`.
    """

    name: str
    parameters: int
    classes: int
    family: str
    dense: bool
    summary: str
    reproduces: str
    options: Mapping[str, Any]
    explanations: Mapping[str, str]
    shares: Mapping[str, float]
    weights: tuple[str, ...] = ()


def names(filter: str = "*") -> list[str]:
    """The names of all models, or of those that match ``filter``, a pattern such as ``"geq*"``.

    >>> names("geq-*imagenet")
    ['geq-6m-imagenet', 'geq-13m-imagenet']
    """
    return [name for name in MODELS if fnmatch(name, filter)]


@overload
def register_model(name: Builder) -> Builder: ...


@overload
def register_model(name: str, summary: str = ..., family: str = ...) -> Callable[[Builder], Builder]: ...


def register_model(name: str | Callable[..., Any], summary: str = "", family: str = "custom") -> Callable[..., Any]:
    """A decorator: enter a model of your own under ``name``, for :func:`create`, recipes and :func:`from_pretrained`.

    Without parentheses, ``@register_model``, it takes the function's name. The function takes ``in_channels`` and
    ``num_classes`` and returns stem, equilibrium and head. Its other parameters have defaults and are the model's
    options.

    >>> from torch import nn
    >>> @register_model("my-linear", summary="a linear classifier")
    ... def my_linear(in_channels, num_classes, size=8):
    ...     return nn.Flatten(), nn.Identity(), nn.Linear(in_channels * size**2, num_classes)
    >>> create("my-linear", num_classes=3, in_channels=1)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 3])
    >>> unregister_model("my-linear")
    """
    if callable(name):
        return register_model(name.__name__)(name)
    if name in MODELS:
        raise UserError(f"there is a model {name!r} already; choose another name, or call unregister_model first")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"a model's name has letters, digits, dots, dashes and underscores; got {name!r}")

    def enter(function: Builder) -> Builder:
        about = summary or (function.__doc__ or "")
        MODELS[name] = Entry(family, builder_of(function), options_of(function), about, own=True)
        return function

    return enter


def unregister_model(name: str) -> None:
    """Remove a model from the registry."""
    _entry(name)
    _parameters.cache_clear()
    del MODELS[name]


def default_options(name: str) -> dict[str, Any]:
    """All options of a model with their defaults."""
    return _entry(name).options.plain()


def is_dense(name: str) -> bool:
    """Whether a model is for segmentation."""
    return issubclass(_entry(name).make, segmenter.Segmenter)


def describe(name: str) -> ModelCard:
    """The description of a model.

    >>> card = describe("mopteq-0.48m")
    >>> card.family, card.options["scales"]
    ('mopteq', [1, 2, 4, 8])
    """
    entry = _entry(name)
    sizes = _parameters(name)
    total = sum(sizes.values())
    return ModelCard(
        name,
        total,
        entry.classes,
        entry.family,
        is_dense(name),
        entry.summary,
        entry.reproduces,
        default_options(name),
        entry.options.explanations(),
        {part: size / max(total, 1) for part, size in sizes.items()},
        tuple(one.name for one in pretrained.released() if one.model == name),
    )


@overload
def create(
    name: str, num_classes: int = ..., in_channels: int = ..., features_only: Literal[False] = ..., **options: Any
) -> Classifier: ...


@overload
def create(
    name: str, num_classes: int = ..., in_channels: int = ..., *, features_only: Literal[True], **options: Any
) -> FeatureExtractor: ...


def create(
    name: str, num_classes: int = 10, in_channels: int = 3, features_only: bool = False, **options: Any
) -> Classifier | FeatureExtractor:
    """A model by name, freshly initialised.

    Args:
        name: one of :func:`names`.
        num_classes: number of logits; 0 for a model without its last layer, which returns the features before it.
        in_channels: channels of the images.
        features_only: return stem and equilibrium alone, a module that gives a list with the features of every branch.
        options: changes of the model's defaults; ``describe(name).options`` lists them.

    >>> model = create("mopteq-193k", num_classes=100, diversity=0.0)
    >>> model.config["options"]["diversity"], model.head.linear.out_features
    (0.0, 100)
    """
    entry = _entry(name)
    whole(0, most=MOST_CLASSES).apply("num_classes", num_classes)
    whole().apply("in_channels", in_channels)
    try:
        chosen = entry.options.changed(options)
        if torch.get_default_device().type != "meta" and not entry.own:
            with on_meta_device():
                _check_size(entry.build(in_channels, num_classes, chosen))
        parts = entry.build(in_channels, num_classes, chosen)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{name}: {error}") from error
    except RuntimeError as error:  # torch's own words for numbers of weights that it can't count, or has no memory for
        raise UserError(f"{name}: {str(error).partition(chr(10))[0]}") from error
    config = {
        "name": name,
        "num_classes": num_classes,
        "in_channels": in_channels,
        "options": chosen.plain(),
        "extra": {},
    }
    model = entry.make(*parts, config)
    return FeatureExtractor(model) if features_only else model


def from_pretrained(source: str | Path, model: Classifier | None = None) -> Classifier:
    """The model that :meth:`Classifier.save_pretrained` wrote, in evaluation mode.

    Args:
        source: a folder with ``config.json`` and ``model.safetensors``; a name of :func:`released`, weights in the
            package; or ``owner/name`` on the Hugging Face hub, of which exactly these two files are fetched. Pickled
            weights are refused: reading them could run code.
        model: put the weights into this model instead of one made from the configuration; for models whose parts
            were replaced, which a configuration can't describe.

    >>> from_pretrained("digits").config["name"]
    'opteq-digits'
    """
    with needs_extra("train"):  # huggingface_hub, for a name on the hub
        settings, weights = pretrained.locate(source)
    config = pretrained.read_config(settings)
    replaced = config.pop("replaced")
    if model is None:
        if replaced:
            parts = ", ".join(part[:100] for part in replaced[:3]) + (", ..." if len(replaced) > 3 else "")
            raise UserError(
                f"{settings}: {parts} of the model was replaced before it was saved; give a model with the same parts: "
                "from_pretrained(folder, model=yours)"
            )
        try:
            with _to_be_filled(_entry(config["name"])):
                model = create(config["name"], config["num_classes"], config["in_channels"], **config["options"])
        except ValueError as error:
            raise UserError(f"{settings}: {error}") from error
    pretrained.load(model, weights)
    model.config = config
    return model.eval()


def meta_model(config: Mapping[str, Any]) -> Classifier | None:
    """The model that a configuration describes, to compare with; None where it describes none."""
    try:
        with _to_be_filled(_entry(config["name"])):
            model: Classifier = create(
                config["name"], config["num_classes"], config["in_channels"], **config["options"]
            )
            return model
    except (KeyError, TypeError, ValueError):
        return None


@contextmanager
def _to_be_filled(entry: Entry) -> Iterator[None]:
    """A model made inside draws no random numbers, and has no memory.

    One of a user has its own: a file of weights does not hold what its function computes beside them, such as tensors
    that are no buffers, or buffers that are not persistent.
    """
    with torch.random.fork_rng(devices=[]) if entry.own else on_meta_device():
        yield


def _check_size(parts: Parts) -> None:
    count = sum(parameter.numel() for part in parts for parameter in part.parameters())
    if count > MOST_PARAMETERS:
        raise UserError(f"it would have {count:.2g} parameters, over {MOST_PARAMETERS:.2g}; make it smaller")


@cache
def _parameters(name: str) -> dict[str, int]:
    entry = _entry(name)
    with _to_be_filled(entry):  # counting draws nothing at random
        try:
            model = create(name, entry.classes)
        except Exception:
            if not entry.own:
                raise
            model = create(name, entry.classes, in_channels=1)  # it may be for grey images alone
        middle = "equilibrium" if equilibria(model) else "body"
        parts = {"stem": model.stem, middle: model.equilibrium, "head": model.head}
        return {part: sum(weight.numel() for weight in module.parameters()) for part, module in parts.items()}


def _entry(name: str) -> Entry:
    if name not in MODELS:
        error = unknown_name("model", name, MODELS, "opteq models")
        raise UserError(f"{error}. One of your own is known once the module that registers it is imported")
    return MODELS[name]
