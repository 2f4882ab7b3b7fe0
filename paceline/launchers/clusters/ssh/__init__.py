"""Machines by ssh."""
