"""The optimisation of a run: loss, optimiser, learning-rate schedule, synchronised batch normalisation."""

__all__: list[str] = []
