"""Communication between workers."""
