"""Named classifiers with an equilibrium in the middle, and the baselines they are compared with.

>>> import opteq.models
>>> opteq.models.list()[:2]
['opteq-digits', 'opteq-162k']
>>> model = opteq.models.create("opteq-162k", num_classes=10)
"""

from opteq.models.classifier import Classifier, FeatureExtractor, equilibria
from opteq.models.denoiser import Denoiser
from opteq.models.prediction import Prediction
from opteq.models.pretrained import ReleasedWeights, released
from opteq.models.registry import ModelCard, create, describe, from_pretrained, register_model, unregister_model
from opteq.models.registry import names as list  # `models.list()` reads well; nothing here needs the built-in
from opteq.models.segmenter import Segmenter

__all__ = [
    "Classifier",
    "Denoiser",
    "FeatureExtractor",
    "ModelCard",
    "Prediction",
    "ReleasedWeights",
    "Segmenter",
    "create",
    "describe",
    "equilibria",
    "from_pretrained",
    "list",
    "register_model",
    "released",
    "unregister_model",
]
