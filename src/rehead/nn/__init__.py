"""Layers of torch.nn that compute the same and train faster on a CPU."""
