"""Shards of a parameter server."""
