"""Models of others, in their published form, to compare with."""
