"""Variants of OptEq: seen through an affine change of variable, or with a regulariser that has kinks."""
