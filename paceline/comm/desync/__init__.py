"""What the script itself does with torch.distributed, recorded and compared."""
