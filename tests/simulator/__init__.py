"""Simulator of a run's workers, coordinator and launchers in one process, on a virtual clock, from one seed."""
