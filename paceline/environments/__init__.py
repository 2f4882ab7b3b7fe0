"""Launch environments: worker identity and rendezvous address from a launcher's variables. Does not import torch."""
