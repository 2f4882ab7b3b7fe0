"""What Horovod's interfaces for all frameworks have in common."""
