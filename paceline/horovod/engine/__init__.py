"""Horovod's engine: which ranks have asked for which collective, and the collectives themselves."""
