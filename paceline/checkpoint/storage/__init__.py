"""Where checkpoints are kept: a folder or an object store, and what to do when it fails for a while."""
