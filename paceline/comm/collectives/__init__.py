"""Collective operations over a transport: gathers, exchanges, step headers, agreement of all ranks."""
