"""Several metrics, objects with a state, predictions and streams: the same on any number of workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Printed = Callable[..., list[dict[str, Any]]]

HEAD = """
import dataclasses, os
from functools import partial
import torch
import paceline
from subjects import classes, mlp, tell

data, test = classes(60), classes(301)

class Seen:
    '''A metric that is no mean, and depends on the order.'''
    def __init__(self):
        self.reset()
    def reset(self):
        self.all, self.folded = [], torch.zeros(())
    def update(self, output, target):
        self.all.append(target)
        for one in output[:, 0]:
            self.folded = self.folded * 0.9 + one
    def compute(self):
        counts = torch.bincount(torch.cat(self.all), minlength=4)
        return {"median": torch.cat(self.all).double().median(), "counts": counts, "folded": self.folded.double()}

def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()

def start(**given):
    torch.manual_seed(0)
    return paceline.start(**{
        "model": mlp(), "optimizer": partial(torch.optim.SGD, lr=0.1), "loss": torch.nn.functional.cross_entropy,
        "data": data, "batch": 16, "exact": True,
    } | given)

def train(session, steps=3):
    for batch in session.batches(steps=steps):
        session.step(batch)
"""

SEVERAL = (
    HEAD
    + """
class Stream(torch.utils.data.IterableDataset):
    '''Of unknown length, and with a state.'''
    def __init__(self, samples):
        self.samples, self.place = samples, 0
    def __iter__(self):
        for self.place in range(self.place, len(self.samples)):
            yield self.samples[self.place]
        self.place = 0
    def state_dict(self):
        return {"place": self.place}
    def load_state_dict(self, state):
        self.place = state["place"]

session = start()
train(session)
seen = Seen()
def outputs(model, microbatch):
    torch.rand(int(microbatch[1][0]) + 1)
    return {"logits": model(microbatch[0]), "text": [f"sample {int(one)}" for one in microbatch[1]]}
found = {}
for name, given in {"set": test, "stream": Stream(test), "list": list(test)}.items():
    values = session.evaluate(given, {"accuracy": accuracy, "loss": None, "seen": seen})
    values["seen"]["counts"] = values["seen"]["counts"].tolist()
    predicted = session.predict(given, outputs)
    hidden = session.predict(given, everywhere=False)
    assert (hidden is None) == (session.rank > 0)
    drawn = torch.rand(()).item()
    assert hidden is None or torch.equal(hidden, predicted["logits"])
    found[name] = [values, session.evaluate(given, accuracy), predicted["logits"].tolist(), predicted["text"], drawn]
with torch.no_grad():
    plain = session.model_state()
    model = mlp()
    model.load_state_dict(plain)
    logits = model(torch.stack([one for one, _ in test]))
    near = torch.allclose(logits, torch.tensor(found["set"][2]), atol=1e-5)
tell(found=found, near=near, targets=[f"sample {int(one)}" for _, one in test], print=session.fingerprint(),
     plain=accuracy(logits, torch.tensor([int(one) for _, one in test])).item())

@dataclasses.dataclass
class Sample:
    values: torch.Tensor
    target: int

def forward(model, microbatch):
    return torch.nn.functional.cross_entropy(model(microbatch.values), microbatch.target)
class_data = [Sample(values, int(target)) for values, target in data]
session = start(data=class_data, loss=None, forward=forward, strategy=os.environ.get("STRATEGY", "allreduce"))
train(session)
pair = lambda model, microbatch: (model(microbatch.values), microbatch.target)
values = session.evaluate(class_data, {"accuracy": accuracy, "seen": seen}, forward=pair)
tell(classes=[str(values), session.evaluate(class_data), session.predict(class_data, pair)[1].tolist()])
size_of = lambda one: int(one.values[0, 0] * 1e6) % 97
wrong = {}
for name, call in {
    "object": lambda: session.evaluate(class_data, seen),
    "no metric": lambda: session.evaluate(class_data, {"a": accuracy, "b": 3}),
    "nothing": lambda: session.evaluate(class_data, {}),
    "no forward": lambda: session.predict(class_data),
    "sizes": lambda: session.predict(class_data, lambda model, one: torch.zeros(len(one.target), size_of(one))),
    "scalar": lambda: session.predict(class_data, lambda model, one: one.values.sum()),
    "empty": lambda: session.evaluate(Stream([]), accuracy, forward=pair),
    "no samples": lambda: session.predict([], pair),
    "class": lambda: session.evaluate(class_data, Seen, forward=pair),
    "no use": lambda: session.evaluate(class_data, forward=pair),
    "given": lambda: session.evaluate(class_data, seen, forward=lambda model, one: (one, one.target)),
    "entries": lambda: session.predict(class_data, lambda model, one: [one] * len(one.target)),
    "parts": lambda: session.predict(class_data, lambda model, one: (one.target,) * (1 + size_of(one) % 2)),
}.items():
    try:
        call()
    except paceline.InputError as error:
        wrong[name] = str(error)
for name, stop in {"lengths": None, "samples": 50}.items():
    try:
        session.evaluate(class_data[session.rank :][:stop], accuracy, forward=pair)
    except paceline.DisagreementError as error:
        wrong[name] = str(error)
tell(wrong=wrong)
"""
)


def test_metrics_and_predictions_are_the_same_on_any_number_of_workers(printed: Printed, tmp_path: Path) -> None:
    (alone,) = printed(SEVERAL, 1, tmp_path)
    three = printed(SEVERAL, 3, tmp_path)
    for one in (alone, *three):
        for key in ("found", "classes", "print"):
            assert one[key] == alone[key]
        found = one["found"]
        assert found["set"] == found["list"]
        stream = found["stream"]  # its chunks have other sizes
        assert stream[3] == found["set"][3] and stream[0]["seen"]["counts"] == found["set"][0]["seen"]["counts"]
        assert abs(stream[1] - found["set"][1]) < 1e-6
        values, accuracy, _, text, _ = found["set"]
        assert values["accuracy"] == accuracy and abs(accuracy - one["plain"]) < 1e-6
        assert one["near"] and text == one["targets"] and sum(values["seen"]["counts"]) == 301
        wrong = one["wrong"]
        assert "the arguments of its update are unknown" in wrong["object"]
        assert "The metric 'b' must be a function" in wrong["no metric"]
        assert "empty" in wrong["nothing"]
        assert "predict(data, forward)" in wrong["no forward"]
        assert "sizes of the outputs differ between microbatches" in wrong["sizes"]
        assert "a tensor of type torch.float32" in wrong["scalar"]
        assert "gave no samples" in wrong["empty"]
        assert "a list, has no samples" in wrong["no samples"]
        assert "it is the class Seen" in wrong["class"]
        assert "leave out forward=" in wrong["no use"]
        assert (
            "evaluate: a value that the workers exchange" in wrong["given"]
            and "Sample, which cannot be sent" in wrong["given"]
        )
        assert (
            "predict: a value that the workers exchange" in wrong["entries"]
            and "Sample, which cannot be sent" in wrong["entries"]
        )
        assert "parts of the outputs differ between microbatches" in wrong["parts"]
    for one in three:
        wrong = one["wrong"]
        assert "evaluate: The workers do not agree on data length: rank 0: 60, rank 1: 59" in wrong["lengths"]
        assert "evaluate: The workers do not agree on data samples 0, 7, 14, " in wrong["samples"]
    assert not {"lengths", "samples"} & set(alone["wrong"])


RESUMED = (
    HEAD
    + """
def script(end, name="/a", **given):
    session = start(checkpoint={"directory": os.environ["SAVED"] + name, "every": 1, "background": False}, **given)
    told = []
    for epoch in session.epochs(3):
        for batch in session.batches():
            session.step(batch)
            if batch.step == end:
                return told
        value = session.evaluate(test, {"accuracy": accuracy, "seen": Seen()})
        told.append([str(value), session.predict(test).tolist()])
    return told

tell(first=script(6), second=script(None, resume="auto"), whole=script(None, "/b"))
"""
)


def test_results_are_kept_and_predictions_made_again(printed: Printed, tmp_path: Path) -> None:
    for one in printed(RESUMED, 2, tmp_path, environment={"SAVED": str(tmp_path / "saved")}):
        assert len(one["whole"]) == 3
        assert one["first"] == one["whole"][:1] and one["second"] == one["whole"][1:]
