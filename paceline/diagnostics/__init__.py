"""Checks of the environment before a run (`doctor`), and of two runs beside each other (`verify`)."""
