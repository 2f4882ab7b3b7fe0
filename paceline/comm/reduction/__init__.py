"""Sums and means of tensors over all workers."""
