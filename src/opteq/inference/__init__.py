"""A trained model in use: predictions for image files, restored images, exported files."""

__all__: list[str] = []
