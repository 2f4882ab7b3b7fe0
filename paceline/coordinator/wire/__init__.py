"""Connections to the coordinator: authentication, framing, and limits on what a message may be."""
