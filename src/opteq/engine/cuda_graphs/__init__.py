"""Solves and backward passes captured as CUDA graphs."""
