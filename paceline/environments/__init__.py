"""Launch environments: worker identity and rendezvous address from an engine's variables. Does not import torch."""
