"""Checks before a run starts, for problems on each machine and between machines."""
