"""A trained model in use: predictions for image files."""

__all__: list[str] = []
