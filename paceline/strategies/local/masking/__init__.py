"""Sums of updates in which no worker sees the update of another (secure aggregation)."""
