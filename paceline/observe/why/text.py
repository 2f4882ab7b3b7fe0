"""Findings as sentences."""

from __future__ import annotations

from paceline.observe import noise
from paceline.observe.records import printable
from paceline.observe.why.advice import CROWDED
from paceline.observe.why.culprits import LEAST_SHARE, Findings

_OF_RANK = {
    "start": "rank {rank}{where} takes longer to start than the others",
    "exchange": "rank {rank}{where} {link}",
    "compute": "rank {rank}{where} takes longer to compute than the others",
    "load": "rank {rank}{where} waits longer for its data than the others",
    "update": "rank {rank}{where} takes longer to update the weights than the others",
    "script": "rank {rank}{where} takes longer between steps than the others",
    "checkpoint": "rank {rank}{where} takes longer to save checkpoints than the others",
    "weights": "rank {rank}{where} takes longer to copy or export the weights than the others",
    "evaluate": "rank {rank}{where} takes longer to evaluate than the others",
    "predict": "rank {rank}{where} takes longer in session.predict than the others",
    "map": "rank {rank}{where} takes longer in session.map than the others",
    "extend": "rank {rank}{where} takes longer in session.extend than the others",
}
_OF_ALL = {
    "start": "the first steps take longer than the others",
    "compute": "workers{where} take longer to compute than the others, in turn",
    "exchange": "all workers wait for the exchange of data",
    "load": "all workers wait for their data",
    "update": "all workers update the weights",
    "checkpoint": "training waits for checkpoints",
    "evaluate": "the model is evaluated",
    "weights": "training waits while weights are copied or exported",
    "predict": "session.predict computes",
    "map": "session.map computes",
    "extend": "session.extend adds samples",
    "script": "the script runs between steps",
}


def sentences(findings: Findings) -> list[str]:
    """Return the findings as text, the largest first."""
    lines = []
    if not findings.culprits:
        least = f"{LEAST_SHARE:.0%}"
        lines = [f"all workers compute nearly all of the time: nothing else takes {least} of {findings.steps} steps"]
    for one in findings.culprits:
        layers = f": {one.layer}" if one.layer is not None else ""
        where = f" (stage {one.stage}{layers})" if one.stage is not None else f" on {one.host}" if one.host else ""
        link = (
            "sends and receives slowly"
            if one.sender is None and one.receiver is None
            else (
                f"receives slowly from {'the others' if one.sender is None else f'rank {one.sender}'}"
                if one.rank == one.receiver
                else f"sends slowly to {'the others' if one.receiver is None else f'rank {one.receiver}'}"
            )
        )
        text = (_OF_ALL if one.rank is None else _OF_RANK)[one.kind].format(rank=one.rank, where=where, link=link)
        lost = one.share * findings.seconds
        each = f"{lost:.3g} s" if one.kind == "start" else f"{1000 * lost / findings.steps:.3g} ms of each step"
        lines.append(f"{printable(text)}: {one.share:.0%} of the time, {each}")
    if findings.delayed >= CROWDED:
        lines.append(
            f"there are too few cores: workers were ready to run but had no core for {findings.delayed:.0%} of the time"
        )
    lines += [f"try {one.set}: about {one.gain:.0%} less time" for one in findings.advice]
    return lines if findings.noise is None else [*lines, noise.sentence(findings.noise)]
