"""Replay of a past step: digests of each step, what a run has recorded of it, and a closer look at it."""
