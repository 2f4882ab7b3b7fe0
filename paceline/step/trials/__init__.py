"""What the first step finds out about a forward pass by computing it once more than it must."""
