"""The order of samples and their loading."""
