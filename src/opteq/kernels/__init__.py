"""Kernels: how the state of GEQ is compared with its input."""

from opteq.kernels.base import Kernel, Similarity
from opteq.kernels.gaussian import Gaussian
from opteq.kernels.inner_product import InnerProduct, Linear, Polynomial, Sigmoid

__all__ = ["Gaussian", "InnerProduct", "Kernel", "Linear", "Polynomial", "Sigmoid", "Similarity"]
