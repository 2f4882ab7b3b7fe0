"""Data-parallel strategies: every worker holds the whole model."""
