"""Rented machines: their types, what their interruptions cost, and the bill."""
