"""Strategies whose workers hold stages of the model."""
