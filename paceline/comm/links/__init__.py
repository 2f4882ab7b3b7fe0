"""Channels for tensors between two workers."""
