"""Layers of torch.nn that train faster on a CPU and compute the same."""
