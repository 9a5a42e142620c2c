"""Inference with a trained model: predictions for image files, restored images, exported files."""

__all__: list[str] = []
