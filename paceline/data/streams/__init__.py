"""Streams: data sets whose samples come one after the other, and whose number nobody knows in advance."""
