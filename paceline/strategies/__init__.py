"""Strategies: which worker computes which microbatch, when, and how gradients are combined. One file per algorithm."""
