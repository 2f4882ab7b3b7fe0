"""How workers come together."""
