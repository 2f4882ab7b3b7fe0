"""What moves tensors between workers, and what each way of doing so can do."""
