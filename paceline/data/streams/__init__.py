"""Streams: iterable data sets of unknown length."""
