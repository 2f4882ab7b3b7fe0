"""What training will cost: profile and plan file."""
