"""Keras 3 models on the torch back end, with their optimizers and losses, as a session takes torch's.

Keras is only imported by the script. What is of Keras is told by its class.
"""
