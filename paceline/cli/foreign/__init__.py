"""Translations of other projects' command lines."""
