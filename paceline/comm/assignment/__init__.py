"""Assignment of microbatches and steps to workers."""
