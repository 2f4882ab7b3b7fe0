"""Tensors from one worker to another."""
