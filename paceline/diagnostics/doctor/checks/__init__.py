"""What the facts mean: pure functions from facts to findings."""
