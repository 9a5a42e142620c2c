"""Whether a model can take pictures of the size that it will get, asked before it is given any."""

from __future__ import annotations

import torch

from opteq.analysis.terms import evaluating
from opteq.common.errors import UserError
from opteq.data import Batches
from opteq.equilibrium import Equilibrium
from opteq.models import Classifier
from opteq.training.run import rng


@torch.no_grad()
def check_size(model: Classifier, batches: Batches) -> None:
    """Raise unless ``model`` can take pictures as large as those of ``batches``.

    Branches on several scales, or patches, ask that sizes can be divided. A run would find that out in its first step,
    or, where training sees windows and the test whole pictures, after its first epoch. The stem is applied to a blank
    picture and the equilibrium's problem bound to what it gives; nothing is solved, and random numbers and the model
    are afterwards as they were.
    """
    height, width = batches.augmentation.size(batches.height, batches.width)
    blank = torch.zeros(1, batches.channels, height, width, device=batches.device)
    try:
        with rng.preserved(), evaluating(model):
            given = model.stem(blank)
            if isinstance(model.equilibrium, Equilibrium):
                model.equilibrium.problem(given)
    except ValueError as error:
        way = "augment.crop_height and crop_width" if batches.augmentation.windows else "data.image_size"
        raise UserError(
            f"{model.config['name']} cannot take pictures of {height}x{width} pixels: {str(error).rstrip('.')}; "
            f"choose another size by {way}"
        ) from error
