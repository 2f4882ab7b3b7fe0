"""Adapters of Keras 3 models, optimizers and losses on the torch back end, for use in a session.

Only the script imports Keras. Keras objects are recognized by their classes.
"""
