"""Models that are built without memory and get their initial values later.

::

    deferred()       an operation runs at once ──> recorded, its random state too ──> memory freed when more is needed
                     an operation reads freed memory ──> recompute it from the recorded operations
    materialize()    for each parameter in turn: recompute the values, in their final memory

Tensors are real tensors on their own device whose storage is resized to 0 bytes, so objects, tied weights and views
keep their identity. Values that the script reads while it builds the model are computed on demand.
"""
