"""Script of ``paceline demo``: handwritten digits of scikit-learn, a small network, ten epochs.

It is an ordinary Paceline script. ``python digits.py result.json`` trains it in a single process.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits

import paceline

EPOCHS = 10
TEST_SAMPLES = 360


def digits() -> tuple[torch.utils.data.TensorDataset, torch.utils.data.TensorDataset]:
    """Return 1797 images of 8 x 8 pixels, shuffled and split into a training set and a test set."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels)[order]
    train = torch.utils.data.TensorDataset(x[TEST_SAMPLES:], y[TEST_SAMPLES:])
    return train, torch.utils.data.TensorDataset(x[:TEST_SAMPLES], y[:TEST_SAMPLES])


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the fraction of digits that are classified correctly."""
    return (output.argmax(dim=1) == target).float().mean()


def main(result: Path) -> None:
    """Train, and write the learning curve and the fingerprint of the result to a file."""
    torch.manual_seed(0)
    train, test = digits()
    session = paceline.start(
        model=torch.nn.Sequential(
            torch.nn.Linear(64, 128),
            torch.nn.ReLU(),
            torch.nn.Linear(128, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 10),
        ),
        optimizer=partial(torch.optim.AdamW, lr=2e-3),
        loss=torch.nn.functional.cross_entropy,
        data=train,
        batch=64,
        exact=True,
    )
    curve = []
    for _ in range(EPOCHS):
        losses = [session.step(batch).loss for batch in session.batches(epochs=1)]
        curve.append({"loss": sum(losses) / len(losses), "accuracy": session.evaluate(test, accuracy)})
    fingerprint = session.fingerprint()
    if session.rank == 0:
        result.write_text(json.dumps({"epochs": curve, "fingerprint": fingerprint}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
