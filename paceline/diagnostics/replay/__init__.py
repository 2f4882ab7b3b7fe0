"""Replay of a past step: digests of each step, a run's records of it, and a closer look at it."""
