"""Operating-system and Python facilities: files, secrets, masking, tracebacks, fault points."""
