"""Strategies whose workers send gradients to servers of the parameters."""
