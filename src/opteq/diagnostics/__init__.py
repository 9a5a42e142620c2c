"""Diagnostics of solves: warnings, whether a solution is a minimum, the objective step by step."""
