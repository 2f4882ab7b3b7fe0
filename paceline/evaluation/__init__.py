"""Measures a model on a data set: each sample exactly once, on any number of workers."""
