"""Clusters that provide machines for a run. Each module implements the interface in ``base.py``."""
