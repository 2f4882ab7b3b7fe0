"""Sums of updates of which nobody sees a single update (secure aggregation)."""
