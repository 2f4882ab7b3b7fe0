"""Data sets whose parts live on different machines."""
