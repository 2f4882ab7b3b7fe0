"""Strategies whose workers send gradients to parameter servers."""
