"""Costs of a training run: profile of the model, and plan file."""
