"""Readers of the data sets' own formats."""

__all__: list[str] = []
