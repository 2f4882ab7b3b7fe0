"""Evaluation of a model on a data set, which uses each sample exactly once on any number of workers."""
