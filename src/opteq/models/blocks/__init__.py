"""Building blocks of models: stems, injections, heads and residual blocks."""
