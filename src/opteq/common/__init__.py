"""What all parts of the library share: options, errors, files."""
