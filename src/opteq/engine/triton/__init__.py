"""Triton kernels for the steps of solvers and for a few operations that captured solves repeat."""
