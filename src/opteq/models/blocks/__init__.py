"""What models are built of: stems, injections, heads and residual blocks."""
