"""Who computes which microbatch."""
