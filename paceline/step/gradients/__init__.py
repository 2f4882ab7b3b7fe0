"""Accumulation of a step's gradients, in floating or fixed point, and for several microbatches at once."""
