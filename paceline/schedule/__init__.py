"""Schedules of a training step as plain data. No torch, no clock."""
