"""Communication between workers.

A call that waits for other workers raises WorkerLost if one of them was lost, or sent nothing before the timeout.
"""
