"""Sums and means of tensors over workers."""
