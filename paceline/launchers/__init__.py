"""Launchers and clusters: start workers, watch them, report how they ended. This package does not import torch."""
