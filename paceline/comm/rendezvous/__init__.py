"""How workers find and connect to each other."""
