"""The gradients of a step: how they are added up, in floating or fixed point, and several microbatches at once."""
