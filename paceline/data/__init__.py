"""Sample order and loading."""
