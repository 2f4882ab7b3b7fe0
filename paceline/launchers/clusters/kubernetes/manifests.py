"""Manifests of a run: an Indexed Job with its Service, a JobSet, or Kubeflow's TrainJob.

A pod is a machine of the run. It runs an agent, its host name contains its index, and the pod with index 0 runs the
coordinator. A lost pod is replaced by a pod with the same index, which joins the run under the same name.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.environments import env
from paceline.errors import PREEMPTED

PORT = 29500
RUNS = "runs"
_AFTER_GRACE_SECONDS = 15  # seconds for the processes of a pod to end after its workers have ended
_REPLACED = 6
_USER = 1000
_JOBSET = "jobset.sigs.k8s.io/jobset-name"
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Pods:
    """Specification of the pods of a run."""

    name: str  # name of all objects
    image: str
    command: tuple[str, ...]
    count: int  # number of pods
    workers: int  # number of workers per pod
    grace_seconds: float  # time for the last checkpoint after SIGTERM
    runs: str  # parent folder of the run directories
    namespace: str | None = None  # namespace of all objects. Defaults to the namespace of the context.
    gpus: int | None = None  # number of GPUs per pod, or None
    volume: str | None = None  # PersistentVolumeClaim for the run directories. Defaults to an emptyDir.

    def metadata(self) -> Manifest:
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


@dataclass(frozen=True)
class Kind:
    """Kind of Kubernetes object for the pods."""

    resource: str  # name of the kind for kubectl
    first: str  # suffix that the host name of pod 0 adds to the name of the run
    label: str  # label that selects its pods. The value is the name of the run.
    write: Callable[[Pods], list[Manifest]]  # function that returns the manifests of a run

    def objects(self, name: str) -> list[str]:
        """Return all objects of a run, as arguments for kubectl."""
        return [f"{one}/{name}" for one in (self.resource, *(["service"] if self.resource == "job" else []), "secret")]

    def rendezvous(self, name: str) -> str:
        return f"{name}{self.first}.{name}:{PORT}"


def text(kind: Kind, pods: Pods) -> str:
    """Return the manifests without the secret: a comment and JSON, which together are YAML."""
    where = f" -n {pods.namespace}" if pods.namespace else ""
    told = (
        f"The pods know each other by a secret, which is not in this file. Make it before:\n"
        f"  openssl rand -hex 32 | kubectl create secret generic {pods.name}{where} "
        f"--from-file={env.SECRET}=/dev/stdin"
    )
    documents = [json.dumps(one, indent=2, ensure_ascii=False) for one in kind.write(pods)]
    return "\n".join([textwrap.indent(told, "# "), "\n---\n".join(documents), ""])


def secret(pods: Pods, value: str) -> Manifest:
    """Return the manifest of the Secret from which the pods read the secret of the run."""
    data = {env.SECRET: value}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": pods.metadata(), "type": "Opaque", "stringData": data}


def _job(pods: Pods) -> list[Manifest]:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pods.metadata(),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": pods.name},
        },
    }
    spec = _job_spec(pods, {"subdomain": pods.name})
    return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": pods.metadata(), "spec": spec}]


def _jobset(pods: Pods) -> list[Manifest]:
    worker = {"name": "worker", "replicas": 1, "template": {"spec": _job_spec(pods, {})}}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": pods.name, "publishNotReadyAddresses": True},
        "replicatedJobs": [worker],
    }
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": pods.metadata(), "spec": spec}]


def _trainjob(pods: Pods) -> list[Manifest]:
    pod = {
        "terminationGracePeriodSeconds": termination_seconds(pods.grace_seconds),
        "securityContext": _POD_SECURITY,
        "volumes": _volumes(pods),
        "containers": [{"name": "node", "securityContext": _CONTAINER_SECURITY, "volumeMounts": _mounts(pods)}],
    }
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"manager": "paceline/run", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": pods.image,
            "command": list(pods.command),
            "numNodes": pods.count,
            "env": _environment(pods),
            "resourcesPerNode": _resources(pods),
        },
        "runtimePatches": [patch],
    }
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    return [{**head, "metadata": pods.metadata(), "spec": spec}]


def _job_spec(pods: Pods, network: Mapping[str, str]) -> Manifest:
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [PREEMPTED]}},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1, 2]}},
    ]
    return {
        "completionMode": "Indexed",
        "completions": pods.count,
        "parallelism": pods.count,
        "backoffLimitPerIndex": _REPLACED,
        "podFailurePolicy": {"rules": rules},
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": {
            "spec": {
                **network,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": termination_seconds(pods.grace_seconds),
                "securityContext": _POD_SECURITY,
                "containers": [
                    {
                        "name": "train",
                        "image": pods.image,
                        "command": list(pods.command),
                        "env": _environment(pods),
                        "resources": _resources(pods),
                        "securityContext": _CONTAINER_SECURITY,
                        "volumeMounts": _mounts(pods),
                    }
                ],
                "volumes": _volumes(pods),
            }
        },
    }


_POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "runAsGroup": _USER,
    "fsGroup": _USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def termination_seconds(grace_seconds: float) -> int:
    """Return the time in seconds in which a pod must end after SIGTERM."""
    return math.ceil(grace_seconds) + _AFTER_GRACE_SECONDS


def _environment(pods: Pods) -> list[Manifest]:
    return [{"name": env.SECRET, "valueFrom": {"secretKeyRef": {"name": pods.name, "key": env.SECRET}}}]


def _resources(pods: Pods) -> Manifest:
    requests = {"cpu": str(pods.workers), "memory": f"{pods.workers}Gi"}
    return {"requests": requests} | ({"limits": {"nvidia.com/gpu": str(pods.gpus)}} if pods.gpus else {})


def _mounts(pods: Pods) -> list[Manifest]:
    return [{"name": "shm", "mountPath": "/dev/shm"}, {"name": RUNS, "mountPath": pods.runs}]


def _volumes(pods: Pods) -> list[Manifest]:
    kept: Manifest = {"persistentVolumeClaim": {"claimName": pods.volume}} if pods.volume else {"emptyDir": {}}
    return [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": RUNS, **kept}]


KINDS = {
    "job": Kind("job", "-0", "batch.kubernetes.io/job-name", _job),
    "jobset": Kind("jobset", "-worker-0-0", _JOBSET, _jobset),
    "trainjob": Kind("trainjob", "-node-0-0", _JOBSET, _trainjob),
}
