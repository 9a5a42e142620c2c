"""Charts as inline SVG, tables and images."""

__all__: list[str] = []
