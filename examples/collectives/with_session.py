"""The same with the session, to the last bit, with a collective of one's own: paceline run -n 4 with_session.py"""

import os
from functools import partial

import torch
import torch.distributed as dist
from problem import BATCH, data, new_model

import paceline

session = paceline.start(
    model=new_model(),
    optimizer=partial(torch.optim.SGD, lr=0.1),
    loss=torch.nn.functional.cross_entropy,
    data=torch.utils.data.TensorDataset(*data()),
    batch=BATCH,
    exact=True,
)
for batch in session.batches(epochs=2):
    report = session.step(batch)
    if batch.step == 5 and session.workers > 1:
        largest = torch.tensor(report.loss)
        if os.environ.get("FORGET") != str(session.rank):  # FORGET=1 lets rank 1 leave it out
            dist.all_reduce(largest, dist.ReduceOp.MAX)
fingerprint = session.fingerprint()
if session.rank == 0:
    print(f"fingerprint {fingerprint}")
