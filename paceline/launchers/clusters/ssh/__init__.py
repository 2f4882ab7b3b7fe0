"""Machines reached by ssh: checks before the start, and agents on each machine."""
