"""A matrix as an operator."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opteq.operators.base import LinearMap, Operator, checked_bound, checked_size, wrong_shape
from opteq.operators.norms import bounding_factor, kernel_norm, normalised

#: Norm at initialisation where no bound is asked for: below 1, so that an equilibrium exists at the start of training.
INITIAL_NORM = 0.9
