"""Traces of runs, their comparison, and likely causes of differences."""
