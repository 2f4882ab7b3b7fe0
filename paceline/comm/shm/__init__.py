"""Shared memory and locks between the processes of one machine."""
