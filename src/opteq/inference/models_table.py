"""``opteq models``: the table of all models. It does not load what training needs."""

from __future__ import annotations

from rich.table import Table

from opteq import models


def models_table() -> Table:
    """All models, with the number of parameters for the classes of the published result, or for ten."""
    table = Table("model", "parameters", "what it is, and what it reproduces", title="Models", row_styles=("", "dim"))
    table.caption = "weights in the package, for from_pretrained, predict and play: " + "; ".join(
        f"{one.name} ({one.summary})" for one in models.released()
    )
    table.columns[0].no_wrap = True
    table.columns[1].justify = "right"
    for name in models.list():
        card = models.describe(name)
        has = f"weights: {', '.join(card.weights)}" if card.weights else ""
        table.add_row(name, f"{card.parameters:,}", "; ".join(filter(None, (card.summary, card.reproduces, has))))
    return table
