"""What all parts of the library share: options, errors, autocast, warnings about convergence."""
