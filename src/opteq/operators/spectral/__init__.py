"""Certified upper bounds of the norms of matrices and convolutions."""
