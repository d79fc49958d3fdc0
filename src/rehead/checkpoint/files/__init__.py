"""Files on disk: whole or not at all, tensors read one at a time."""
