"""Data-parallel strategies whose workers divide the training state."""
