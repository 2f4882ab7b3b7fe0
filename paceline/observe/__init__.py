"""Readers of the event files of a run. Training never imports them, and they do not import torch.

::

    records      the lines of the event files
    pipelines    a model cut into stages: how, when, which steps; and the operations that its workers did
    completeness which steps are recorded in full
    times        what an operation takes, by the plan or as measured
    timelines    a step as it was measured, and as the clock predicts it
    comparison   both of a run's step, and who waited for whom
    page         the comparison as one HTML file
"""
