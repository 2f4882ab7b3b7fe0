"""How processes meet."""
