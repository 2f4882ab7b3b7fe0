"""Adapters for objects of other libraries: Keras models, Lightning modules, trackers."""
