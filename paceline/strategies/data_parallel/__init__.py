"""Strategies whose workers all hold the whole model."""
