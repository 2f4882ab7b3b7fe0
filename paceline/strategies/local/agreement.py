"""Agreement of the workers on the steps of a period of local training."""

from __future__ import annotations

from paceline.errors import DisagreementError


def check_trained(everyone: list[list[int]]) -> None:
    """Raise DisagreementError if the workers trained on different batches. ``everyone`` has the steps of each rank."""
    steps = set().union(*everyone)
    for rank, trained in enumerate(everyone):
        if missing := steps - set(trained):
            raise DisagreementError(
                f"Rank {rank} has skipped the batch of step {min(missing)}, which others have trained on. Every "
                f"worker must take the same batches from session.batches; look for a loop that leaves or skips early "
                f"on some ranks only."
            )
