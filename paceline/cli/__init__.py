"""Commands, each in a separate file. The only package that prints."""
