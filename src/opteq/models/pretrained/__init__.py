"""Weights and configuration on disk: two files, ``config.json`` and ``model.safetensors``, that can't run code."""

from opteq.models.pretrained.files import CONFIG, KEYS, WEIGHTS, locate, read_config, save
from opteq.models.pretrained.hub import push
from opteq.models.pretrained.released import ReleasedWeights, released, released_folder
from opteq.models.pretrained.structure import replaced_parts
from opteq.models.pretrained.weights import load

__all__ = [
    "CONFIG",
    "KEYS",
    "WEIGHTS",
    "ReleasedWeights",
    "load",
    "locate",
    "push",
    "read_config",
    "released",
    "released_folder",
    "replaced_parts",
    "save",
]
