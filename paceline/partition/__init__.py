"""Partitioning of a model into stages."""
