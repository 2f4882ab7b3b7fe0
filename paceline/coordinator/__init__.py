"""Coordinator of a run: membership protocol, server, hang detection, and machine agents. No torch."""
