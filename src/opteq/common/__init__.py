"""Shared helpers: options, errors, files."""
