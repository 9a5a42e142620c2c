"""What is minimised and how: loss, optimiser, learning-rate schedule, synchronised batch normalisation."""

__all__: list[str] = []
