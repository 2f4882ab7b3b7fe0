"""Parsing of a run's objects from the cluster's JSON. This module does not communicate with the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import PREEMPTED

_INDEX = "batch.kubernetes.io/job-completion-index"
_HOPELESS = {
    "ImagePullBackOff": "the image cannot be pulled",
    "InvalidImageName": "the name of the image is invalid",
    "ErrImageNeverPull": "the image is not on the node",
    "CreateContainerConfigError": "the container cannot be made",
    "CreateContainerError": "the container cannot be made",
    "RunContainerError": "the container cannot be started",
}
"""Reasons of waiting containers that can never start."""
_ENDED = {"Complete": True, "Completed": True, "Failed": False}
_LOST = 5


@dataclass(frozen=True)
class Pod:
    """State of a pod."""

    name: str
    uid: str  # unique id, which distinguishes pods with the same name
    index: int  # index of the machine
    made: str  # creation time
    phase: str  # phase in Kubernetes' terms
    hopeless: str | None = None  # reason why its container can never start, or None
    unschedulable: str | None = None  # reason why no node has room for the pod, or None
    code: int | None = None  # exit code of its container, or None
    ended: str = ""  # end time of its container. Empty if it has not ended.

    @property
    def started(self) -> bool:
        """Whether the pod has started, so that it has a log."""
        return self.phase in ("Running", "Succeeded", "Failed")


def pods_of(found: Mapping[str, Any]) -> list[Pod]:
    """Parse a list of pods. Return the oldest pod first."""
    return sorted(map(_pod, found.get("items", ())), key=lambda pod: pod.made)


def _pod(found: Mapping[str, Any]) -> Pod:
    about, status = found["metadata"], found.get("status", {})
    marks = {**about.get("annotations", {}), **about.get("labels", {})}
    containers = [one.get("state", {}) for one in status.get("containerStatuses", ())]
    waiting = [one["waiting"] for one in containers if "waiting" in one]
    ended = [one["terminated"] for one in containers if "terminated" in one]
    index = str(marks.get(_INDEX, "0"))
    return Pod(
        name=about["name"],
        uid=about.get("uid", about["name"]),
        index=int(index) if index.isdecimal() else 0,
        made=about.get("creationTimestamp") or "",
        phase=status.get("phase", "Pending"),
        hopeless=next((_why(one) for one in waiting if one.get("reason") in _HOPELESS), None),
        unschedulable=next(
            (
                one.get("message", "no node has room")
                for one in status.get("conditions", ())
                if one.get("type") == "PodScheduled" and one.get("reason") == "Unschedulable"
            ),
            None,
        ),
        code=ended[0].get("exitCode") if ended else None,
        ended=(ended[0].get("finishedAt") or "") if ended else "",
    )


def _why(waiting: Mapping[str, Any]) -> str:
    reason = waiting["reason"]
    return f"{_HOPELESS[reason]} ({reason}: {waiting.get('message', 'no more is known')})"


def end_of(job: Mapping[str, Any]) -> tuple[bool, str] | None:
    """Return whether the job has succeeded and its message, or None while the job continues."""
    for one in job.get("status", {}).get("conditions", ()):
        if one.get("type") in _ENDED and one.get("status") == "True":
            return _ENDED[one["type"]], ": ".join(filter(None, (one.get("reason"), one.get("message"))))
    return None


def failed_pod(pods: Sequence[Pod]) -> Pod | None:
    """Return the pod that failed first, or None. Preempted pods do not count as failed."""
    failed = [pod for pod in pods if pod.code not in (None, 0, PREEMPTED)]
    return min(failed, key=lambda pod: (pod.ended, pod.index), default=None)


def exit_code(failed: Pod | None) -> int:
    return failed.code if failed is not None and failed.code else _LOST
