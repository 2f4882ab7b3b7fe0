"""Keras 3 models on torch: through a session with the same bits on any number of workers, and through callbacks."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed")
Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
import copy, json, os, sys, warnings
os.environ["KERAS_BACKEND"] = "torch"
warnings.simplefilter("ignore")
import torch, keras
import paceline
from keras import layers

def dataset(samples=96):
    inputs = torch.randn(samples, 8, 8, 1, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(inputs, inputs.sum(dim=(1, 2, 3)).gt(0).long())

def tell(**values):
    print(json.dumps(values), flush=True)
"""

SESSION = """
keras.utils.set_random_seed(0)
model = keras.Sequential([
    keras.Input((8, 8, 1)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), layers.Flatten(),
    layers.Dropout(0.3), layers.Dropout(0.2, seed=5), layers.Dense(2),
])
started = float(model.layers[1].moving_mean.value.abs().sum())
session = paceline.start(
    model=model, data=dataset(), batch=24, microbatches=6, exact=True,
    optimizer=lambda parameters: keras.optimizers.Adam(0.01),
    schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    checkpoint={"every": 4, "directory": os.environ["TO"]}, resume=os.environ.get("FROM"),
)
for batch in session.batches(epochs=2):
    report = session.step(batch)
accuracy = session.evaluate(dataset(), lambda output, target: (output.argmax(1) == target).float().mean())
tell(
    fingerprint=session.fingerprint(), accuracy=accuracy, position=session.position, loss=report.loss,
    rate=float(session._context.update.optimizer._optimizer.learning_rate),
    moved=float(model.layers[1].moving_mean.value.abs().sum()) - started,
    names=sorted(session.model_state()),
)
"""


@pytest.mark.slow(turns=6)
def test_one_hash_on_any_number_of_workers_also_resumed(printed: Printed, tmp_path: Path) -> None:
    def trained(workers: int, **more: str) -> list[dict[str, Any]]:
        variables = {"TO": str(tmp_path / f"of {workers}"), **more}
        return printed(HEAD + SESSION, workers, tmp_path, environment=variables)

    (one,) = trained(1)
    several = trained(3)
    resumed = trained(2, FROM=str(tmp_path / "of 3" / "step-000004"))
    for other in [*several, *resumed]:
        assert {key: other[key] for key in ("fingerprint", "accuracy", "loss")} == {
            key: one[key] for key in ("fingerprint", "accuracy", "loss")
        }
    assert one["position"] == 8 and one["rate"] == pytest.approx(0.01 / 4)
    assert one["moved"] > 0, "the batch norm does not train"
    assert len(one["names"]) == 8


BY_HAND = """
def made():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(5, "tanh"), layers.Dense(2)])

data, loss = dataset(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
for name in ("SGD", "Adam", "RMSprop", "Adagrad", "Lion"):
    new = lambda parameters=None: getattr(keras.optimizers, name)(
        0.01, clipnorm=1.0, **({"momentum": 0.9, "nesterov": True} if name == "SGD" else {})
    )
    model, plain, optimizer = made(), made(), new()
    session = paceline.start(model=model, data=data, batch=32, microbatches=1, optimizer=new, loss=loss)
    optimizer.build(plain.trainable_variables)
    for batch in session.batches(epochs=2):
        if batch.step == 3:  # a state that torch loads is in other tensors than Keras has
            adapted = session._context.update.optimizer
            state = copy.deepcopy(adapted.state_dict())
            for slot in [slot for slots in adapted._slots for slot in slots.values()]:
                slot.assign(torch.full_like(slot.value, 7.0))
            adapted.load_state_dict(state)
        session.step(batch)
        inputs, targets = batch.groups[0].data
        plain.zero_grad()
        loss(targets, plain(inputs, training=True)).backward()
        with torch.no_grad():
            optimizer.apply([one.value.grad for one in plain.trainable_variables], plain.trainable_variables)
    for one, other in zip(model.variables, plain.variables):
        assert torch.equal(one.value, other.value), name  # a batch of a power of two: no rounding between sum and mean

def refused(text, **given):
    try:
        paceline.start(**{"model": made(), "data": data, "batch": 32, "optimizer": new, "loss": loss} | given)
    except paceline.InputError as error:
        assert text in str(error), error
        return
    raise AssertionError(text)

refused("has no weights yet", model=keras.Sequential([layers.Dense(2)]))
refused("use an optimizer of torch", model=torch.nn.Linear(8, 2))
for kind in ("Nadam", "Adafactor"):
    refused("cannot be saved", optimizer=lambda parameters: getattr(keras.optimizers, kind)(0.01))
refused("microbatches of the session", optimizer=lambda parameters: keras.optimizers.SGD(gradient_accumulation_steps=2))
source = keras.Input((8, 8, 1))
twins = []
for _ in range(2):
    inside = keras.Input((8, 8, 1))
    twins.append(keras.Model(inside, layers.Dense(2, name="same")(layers.Flatten()(inside))))
refused("have the path 'same/kernel'", model=keras.Model(source, twins[0](source) + twins[1](source)))
refused("has been used before", optimizer=lambda parameters: optimizer)
refused("scales the loss", optimizer=lambda parameters: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))

falling = lambda parameters: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))
session = paceline.start(model=made(), data=data, batch=32, optimizer=falling, loss=loss)
rates = [session.step(batch).learning_rate for batch in session.batches(epochs=1)]
assert [round(rate, 6) for rate in rates] == [0.1, 0.05, 0.025], rates
whole = data.tensors
wanted = float(loss(whole[1], session._context.compute.model(whole[0], training=False)))
assert abs(session.evaluate(data, loss) - wanted) < 1e-6
try:
    session.evaluate(data, keras.metrics.SparseCategoricalAccuracy())
except paceline.InputError as error:
    assert "gets the target first" in str(error)
else:
    raise AssertionError("a metric of Keras was taken")
session = paceline.start(
    model=made(), data=data, batch=32, optimizer=falling, loss=loss,
    schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
)
try:
    for batch in session.batches(epochs=1):
        session.step(batch)
except paceline.InputError as error:
    assert "schedule of its own" in str(error)
else:
    raise AssertionError("two schedules were taken")
"""


@pytest.mark.slow
def test_updates_are_those_of_keras_and_what_cannot_be_is_refused(printed: Printed, tmp_path: Path) -> None:
    printed(HEAD + BY_HAND, 1, tmp_path)


CALLBACKS = """
import numpy as np
import paceline.horovod.keras as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()

def made(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(1)])

random = np.random.default_rng(0)
inputs = random.normal(size=(64, 6)).astype("float32")
targets = inputs.sum(1, keepdims=True)
rate = 0.02 * size

plain = made(0)
plain.compile(optimizer=keras.optimizers.SGD(rate / size, momentum=0.9), loss="mse")
warming = hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2, steps_per_epoch=8)
wanted = plain.fit(inputs, targets, batch_size=8, shuffle=False, epochs=4, verbose=0, callbacks=[warming])

model = made(rank)
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(rate / size, momentum=0.9)), loss="mse")
part = slice(rank, None, size)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2),
]
found = model.fit(
    inputs[part], targets[part], batch_size=8 // size, shuffle=False, epochs=4, verbose=0, callbacks=callbacks
)
np.testing.assert_allclose(found.history["loss"], wanted.history["loss"], rtol=1e-4)
np.testing.assert_allclose(found.history["learning_rate"], wanted.history["learning_rate"])
assert wanted.history["learning_rate"][0] < wanted.history["learning_rate"][1] == np.float32(rate)
assert model.optimizer.momentum == 0.9
weights = torch.cat([one.value.detach().reshape(-1) for one in model.weights])
assert torch.equal(hvd.broadcast(weights, 0), weights)

path = os.path.join(os.environ["TO"], f"{rank}.keras")
model.save(path)
loaded = hvd.load_model(path)
for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
    assert torch.equal(one.value, other.value)
try:
    hvd.DistributedOptimizer(loaded.optimizer)
except ValueError as error:
    assert "already distributed" in str(error)
else:
    raise AssertionError("an optimizer was distributed twice")
hvd.shutdown()
"""


@pytest.mark.slow
def test_callbacks_give_the_loss_of_one_process(printed: Printed, tmp_path: Path) -> None:
    printed(HEAD + CALLBACKS, 2, tmp_path, environment={"TO": str(tmp_path)})
