"""Models that are built without memory, and get the initial values of a plain construction later.

::

    deferred()       an operation runs at once ──> recorded, its random state too ──> memory freed when more is needed
                     an operation reads freed memory ──> recompute it from the recorded operations
    materialize()    parameter after parameter: recompute the values, in the memory where they are to stay

Tensors are real tensors on their own device whose storage is resized to 0 bytes, so objects, tied weights and views
keep their identity. Values that the script reads while it builds the model are computed for it.
"""
