"""Kubernetes cluster (``--on kubernetes``): an Indexed Job, JobSet or TrainJob starts and replaces pods."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from paceline.config import quoted
from paceline.environments import env
from paceline.errors import ConfigError, StartError
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Agent, Options, Place, Placement, agent_command, secret_environment
from paceline.launchers.clusters.clients import say
from paceline.launchers.clusters.kubernetes import manifests
from paceline.launchers.clusters.kubernetes.following import Following
from paceline.launchers.clusters.kubernetes.kubectl import Kubectl
from paceline.launchers.clusters.kubernetes.manifests import KINDS, Kind, Pods

_LONGEST_NAME = 46
"""Maximum length of a name. Host names have at most 63 characters, including the kind and the index of the pod."""


@dataclass(frozen=True)
class Submission(Placement):
    """Launch plan for Kubernetes: the pods, and the kind of object that contains them."""

    kind: Kind
    pods: Pods
    detach: bool


class Kubernetes(Place):
    """Kubernetes cluster of the user's kubectl context."""

    examines: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset({"image", "namespace", "kind", "gpus", "volume", "detach"})

    def decide(self, request: Request, options: Options, environment: Mapping[str, str]) -> Submission:
        if (kind := KINDS.get(options.kind or "job")) is None:
            raise ConfigError(f"--kind {quoted(options.kind)}: give one of {', '.join(KINDS)}.")
        if not options.image:
            raise ConfigError(
                "--on kubernetes needs --image: an image with Paceline, the script and its packages. "
                "docs/places/kubernetes.md builds one."
            )
        if options.gpus is not None and options.gpus < 1:
            raise ConfigError(f"--gpus {options.gpus}: give the number of GPUs of each pod, or leave it out.")
        if request.secret_file is not None:
            raise ConfigError("--secret-file has no effect with --on kubernetes: the run makes its own Secret.")
        run = request.name or f"{request.script.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        name = object_name(run)
        least, most = request.nodes or (1, 1)
        runs = Path(os.path.normpath("/" / request.runs))
        agents = replace(
            request,
            name=run,
            runs=runs,
            least=request.smallest,
            most=request.largest,
            settings={"resume": "auto", **request.settings},
        )
        command = agent_command(
            agents, request.workers, request.workers * most, (least, most), kind.rendezvous(name), "python"
        )
        pods = Pods(
            name=name,
            image=options.image,
            command=tuple(command),
            count=most,
            workers=request.workers,
            grace_seconds=request.grace_seconds,
            runs=str(runs),
            namespace=options.namespace,
            gpus=options.gpus,
            volume=options.volume,
        )
        known = secret_environment(request)
        return Submission(
            place="kubernetes",
            agents=tuple(Agent(f"{name}-{index}", pods.command, known) for index in range(most)),
            text=manifests.text(kind, pods),
            kind=kind,
            pods=pods,
            detach=options.detach,
        )

    def carry_out(self, placement: Placement, request: Request) -> int:
        """Submit the pods and follow them until the run ends. Then remove all created objects, unless detached."""
        assert isinstance(placement, Submission)
        kind, pods = placement.kind, placement.pods
        kubectl = Kubectl(pods.namespace)
        if kubectl.get(kind.resource, pods.name):
            raise ConfigError(
                f"There is a {kind.resource} {pods.name} already. Choose another --name, or remove it: "
                f"kubectl delete {' '.join(kind.objects(pods.name))}"
            )
        secret = json.dumps(manifests.secret(pods, placement.agents[0].environment[env.SECRET]))
        following = Following(kubectl, kind, pods, request.patience_seconds)
        try:
            # kubectl mistakes a stream for JSON if it begins with a brace
            kubectl.run("apply", "-f", "-", given=f"---\n{secret}\n---\n{placement.text}")
        except StartError:
            following.remove()
            raise
        where = f"-n {pods.namespace} " if pods.namespace else ""
        if placement.detach:
            say(f"submitted {kind.resource} {pods.name}. See it: kubectl {where}logs -f -l {kind.label}={pods.name}")
            say(f"Remove it: kubectl {where}delete {' '.join(kind.objects(pods.name))}")
            return 0
        say(f"submitted {kind.resource} {pods.name}; waiting for its pods")
        return following.wait()


def object_name(run: str) -> str:
    """Convert a run's name to a Kubernetes name: lower-case letters, digits and hyphens, with a letter first."""
    name = re.sub("[^a-z0-9]+", "-", run.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    return name[:_LONGEST_NAME].rstrip("-")
