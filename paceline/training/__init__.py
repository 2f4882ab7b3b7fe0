"""Training loop of one worker: steps, recovery from lost workers, and membership changes."""
