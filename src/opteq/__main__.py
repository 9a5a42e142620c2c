"""``python -m opteq`` is the command ``opteq``."""

from opteq.cli import app

app()
