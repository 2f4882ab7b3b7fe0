"""A worker's share of a training step: forward, accumulate, check, update."""
