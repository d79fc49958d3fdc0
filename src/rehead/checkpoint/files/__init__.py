"""Files on disk: folders are published atomically, tensors are read one at a time."""
