"""Values as JSON has them."""

from __future__ import annotations

import math
from typing import Any

from opteq.problems import Problem
from opteq.report.html.numbers import explain_symbols, with_symbols


def replace_non_finite(value: Any) -> Any:
    """The same with None in the place of numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: replace_non_finite(inside) for key, inside in value.items()}
    return [replace_non_finite(inside) for inside in value] if isinstance(value, list | tuple) else value


def certificate_of(problem: Problem) -> Any:
    """The certificate of a problem from its weights, for every input."""
    try:
        certificate = problem.certificate()
    except (ValueError, RuntimeError) as error:
        return {"error": str(error)}
    return replace_non_finite({
        "exists": certificate.exists,
        "unique": certificate.unique,
        "contraction": certificate.contraction,
        "lipschitz": certificate.lipschitz,
        "reasons": {name: with_symbols(reason) for name, reason in certificate.reasons.items()},
        "symbols": explain_symbols(certificate.symbols()),
    })  # fmt: skip
