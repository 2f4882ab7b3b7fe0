"""Diagnosis of failed runs."""
