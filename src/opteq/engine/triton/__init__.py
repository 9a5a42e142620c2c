"""Triton kernels for the steps of solvers and for a few operations that captured solves repeat.

A state is a set of blocks, each a matrix ``(rows, width)`` in memory; one program takes ``BLOCK`` entries of one row.
Every program leaves its share of a sum over a row in ``sums (rows, K, parts)``; one program per row adds them up and
accepts or refuses the step (``accept_step``, ``cg_accept``). Rows that have finished are skipped, so they cost no
bandwidth.
"""
