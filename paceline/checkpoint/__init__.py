"""The state of a run: what belongs to it, its hash, its files."""
