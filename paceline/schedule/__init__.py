"""What one step does, as plain data: no torch, no clock."""
