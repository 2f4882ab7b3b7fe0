"""Who computes which microbatch, when, and how the gradients come together: one file for each algorithm."""
