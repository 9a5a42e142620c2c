"""Triton kernels for operations inside a problem's step: resampling, and the Gaussian kernel."""
