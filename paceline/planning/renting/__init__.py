"""Rented machines: their types, the cost of their interruptions, and the bill."""
