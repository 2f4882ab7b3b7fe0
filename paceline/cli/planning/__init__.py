"""Commands that measure a script and predict its training."""
