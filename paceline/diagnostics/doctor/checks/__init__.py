"""Checks of collected facts: pure functions from facts to findings."""
