"""Recording and comparison of the script's own calls of torch.distributed."""
