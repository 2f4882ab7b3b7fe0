"""Collective operations over a transport: gathers, exchanges, headers of steps, agreement of all ranks."""
