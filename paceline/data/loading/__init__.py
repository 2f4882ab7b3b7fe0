"""Reading of samples, and their transfer to a device."""
