"""Transports of tensors between workers, and their capabilities."""
