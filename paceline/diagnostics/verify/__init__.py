"""Record a run, compare two, name the cause."""
