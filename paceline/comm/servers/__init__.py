"""Parameter-server shards, and requests between workers."""
