"""Regularisers: priors on features."""

from __future__ import annotations

from opteq.common.errors import unknown_name
from opteq.regularizers.base import Regularizer
from opteq.regularizers.decorrelation import Decorrelation
from opteq.regularizers.envelope import Envelope
from opteq.regularizers.hsic import HSIC
from opteq.regularizers.norms import L1, Incay, Ridge

__all__ = ["HSIC", "L1", "Decorrelation", "Envelope", "Incay", "Regularizer", "Ridge", "get"]

_BY_NAME: dict[str, type[Regularizer]] = {kind.name: kind for kind in (Ridge, L1, Incay, Decorrelation, HSIC)}


def get(regularizer: str | Regularizer) -> Regularizer:
    """The regulariser of that name with its default options; a regulariser is returned unchanged.

    >>> get("incay")
    Incay(eps=1.0)
    """
    if isinstance(regularizer, Regularizer):
        return regularizer
    if not isinstance(regularizer, str):
        raise TypeError(f"a regularizer is a name or an instance, such as 'ridge' or Ridge(); got {regularizer!r}")
    if regularizer not in _BY_NAME:
        raise unknown_name("regularizer", regularizer, _BY_NAME)
    return _BY_NAME[regularizer]()
