"""Checkpoint storage: a folder or an object store, and retries while it fails."""
