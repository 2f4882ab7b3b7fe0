"""What would go wrong, before a run starts: here, on each machine, and between machines."""
