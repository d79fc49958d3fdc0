"""A model handed to other software."""
