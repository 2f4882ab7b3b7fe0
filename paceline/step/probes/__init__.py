"""Probes of a forward pass: computations that are repeated before the first step and in audits."""
