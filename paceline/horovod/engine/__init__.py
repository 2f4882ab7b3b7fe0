"""Horovod's engine: negotiation of the collectives that ranks request, and the collectives themselves."""
