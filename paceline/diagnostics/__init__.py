"""Checks of the environment before a run (`doctor`), and comparison of two recorded runs (`verify`)."""
