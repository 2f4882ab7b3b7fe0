"""How long the tests of promises wait for a run."""

DEADLINE = 240.0
"""Seconds after which a run is given up: many times what it takes on a busy machine."""
