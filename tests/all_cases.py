"""Every problem that the laws are tested on."""

from __future__ import annotations

from cases import CASES as CORE
from cases_branches import MORE_CASES as BRANCHES
from cases_geq import MORE_CASES as KERNELS

CASES = [*CORE, *BRANCHES, *KERNELS]
