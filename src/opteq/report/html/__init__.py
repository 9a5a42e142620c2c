"""HTML elements, formulas and numbers as text."""

__all__: list[str] = []
