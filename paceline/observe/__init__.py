"""Readers of the event files of a run. Training never imports them, and they do not import torch.

::

    records      the lines of the event files
    index        all records in SQLite, to be searched
    parquet      records as a Parquet file
    tracing      one clock for all machines; what each worker did, as slices on tracks, and the file for Perfetto
    why          where the time went, and which worker or stage takes it
    dashboard    runs in a browser: pages, and the data of each view
    ledger       whether each step was applied exactly once
"""
