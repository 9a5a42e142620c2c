"""Kernels: how the state of GEQ is compared with its input."""

from opteq.kernels.base import Kernel, Similarity
from opteq.kernels.gaussian import Gaussian
from opteq.kernels.inner_product import InnerProduct
from opteq.kernels.linear import Linear
from opteq.kernels.polynomial import Polynomial
from opteq.kernels.sigmoid import Sigmoid

__all__ = ["Gaussian", "InnerProduct", "Kernel", "Linear", "Polynomial", "Sigmoid", "Similarity"]
