"""Gradients averaged by hand: one model, trained by all ranks: paceline run -n 4 averaging.py"""

import torch
import torch.distributed as dist
from partition import batches, part_of
from problem import data, new_model
from torch.nn.functional import cross_entropy


def average_gradients(model, samples_here, samples):
    """Make each gradient the mean over all samples of the batch.

    A part may have a sample more than another one, so the mean of the ranks' means would be another number. All
    gradients go in one tensor: many small all-reduces take longer than one.
    """
    gradients = [one.grad for one in model.parameters()]
    flat = torch.cat([one.flatten() for one in gradients]) * (samples_here / samples)
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, targets = data()
    model, alone = new_model(), new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for epoch in range(2):
        for batch in batches(epoch):
            mine = part_of(batch, rank, size)
            optimizer.zero_grad()
            cross_entropy(model(inputs[mine]), targets[mine]).backward()
            average_gradients(model, len(mine), len(batch))
            optimizer.step()

            reference.zero_grad()  # what one process would do, to compare
            cross_entropy(alone(inputs[batch]), targets[batch]).backward()
            reference.step()

    apart = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    if rank == 0:
        print(f"{apart:.1e} from the model of one process")  # equal up to rounding
    dist.destroy_process_group()
