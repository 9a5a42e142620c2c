"""A run on disk and on the terminal: its folder, checkpoints, metrics, progress and tables."""

__all__: list[str] = []
