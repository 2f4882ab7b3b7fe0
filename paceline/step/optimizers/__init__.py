"""Optimizers of a script: how they are made and called, and several optimizers as one."""
