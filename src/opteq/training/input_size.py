"""Check before training that a model accepts the size of its images."""

from __future__ import annotations

import torch

from opteq.analysis.terms import evaluation_mode
from opteq.common.errors import UserError
from opteq.data import Batches
from opteq.equilibrium import Equilibrium
from opteq.models import Classifier
from opteq.training.run import rng


@torch.no_grad()
def check_input_size(model: Classifier, batches: Batches) -> None:
    """Raise unless ``model`` accepts images of the size of ``batches``.

    Branches on several scales, and patches, need sizes that can be divided. Without this check a run would fail in its
    first step, or after its first epoch where only training crops windows. The stem is applied to a blank image and the
    problem is bound to its output; nothing is solved. Random state and model stay unchanged.
    """
    height, width = batches.augmentation.size(batches.height, batches.width)
    blank = torch.zeros(1, batches.channels, height, width, device=batches.device)
    try:
        with rng.preserve_rng(), evaluation_mode(model):
            given = model.stem(blank)
            if isinstance(model.equilibrium, Equilibrium):
                model.equilibrium.problem(given)
    except ValueError as error:
        way = "augment.crop_height and crop_width" if batches.augmentation.windows else "data.image_size"
        raise UserError(
            f"{model.config['name']} cannot take images of {height}x{width} pixels: {str(error).rstrip('.')}; "
            f"choose another size by {way}"
        ) from error
