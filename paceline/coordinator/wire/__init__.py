"""Connections to the coordinator: authentication, framing, and validation of messages."""
