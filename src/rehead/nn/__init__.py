"""Layers that replace torch.nn's and are faster on a CPU, and the norms of a model."""
