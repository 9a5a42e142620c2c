"""Variants of the papers' models that are redesigned: most of their parameters lie in a pyramid of residual blocks."""

from __future__ import annotations

from typing import Any

_SMALL: dict[str, Any] = {
    "stem": "pyramid",
    "stem_widths": (24, 32, 56),
    "stem_depth": 2,
    "channels": 64,
    "weight_kernel": 1,
    "injection_kernel": 1,
}
_THREE = _SMALL | {"hidden": (88, 88, 88), "scales": (4, 4, 4)}

PYRAMIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "opteq-199k-pyramid": ("opteq-199k", _SMALL | {"hidden": (32, 48, 64, 96, 96), "gradient": "phantom"}),
    "popteq-193k-pyramid": ("popteq-193k", _THREE),
    "mopteq-193k-pyramid": ("mopteq-193k", _THREE | {"diversity": 0.0}),
    "mopteq-0.48m-pyramid": (
        "mopteq-0.48m",
        {
            "stem": "pyramid",
            "stem_widths": (40, 64, 88, 88),
            "stem_depth": (1, 2, 3, 2),
            "stem_block": "inverted",
            "channels": 96,
            "hidden": (32, 64, 96, 128),
            "weight_kernel": 1,
            "injection_kernel": 1,
            "diversity": 0.0,
            "injection_norm": "batch",
        },
    ),
    "geq-5m-pyramid": (
        "geq-5m",
        {
            "stem": "pyramid",
            "stem_widths": (80, 160, 256, 224),
            "stem_depth": 2,
            "stem_block": ("basic", "basic", "basic", "inverted"),
            "channels": 128,
            "hidden": (32, 48, 48, 48, 48, 48),
            "scales": (2, 4, 4, 8, 8, 8),
            "gamma": 0.02,
            "fusion": "none",
            "gradient": "phantom",
            "gradient_steps": 2,
            "gradient_damping": 1.0,
        },
    ),
}
"""The model that each is a variant of, and the options that differ from it."""
