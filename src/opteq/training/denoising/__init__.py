"""Training and tests of denoisers."""
