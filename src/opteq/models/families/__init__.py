"""The models of the library by family: OptEq, MOptEq and POptEq, GEQ, inhibition."""
