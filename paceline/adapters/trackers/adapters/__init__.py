"""Adapters of trackers: a file for each tracker, with the only import of its library."""
