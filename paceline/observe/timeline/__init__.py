"""A step of a pipeline as the clock predicts it and as it was measured, drawn above each other."""
