"""What Paceline needs of the operating system and of Python: files, secrets, tracebacks, masking."""
