"""Manifests of a run, and how it is followed: against a ``kubectl`` that records its calls and answers as told."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fork_server import PACELINE, Command, Forked, ForkServer

from paceline.errors import ConfigError
from paceline.launchers.base import Request
from paceline.launchers.clusters.base import Options
from paceline.launchers.clusters.kubernetes import state
from paceline.launchers.clusters.kubernetes.manifests import KINDS
from paceline.launchers.clusters.kubernetes.place import Kubernetes, Submission, object_name

OPTIONS = Options(image="registry.example/train:1")
TRICKY = [
    "",
    "a b",
    "-x",
    "--on",
    "on",
    "yes",
    "~",
    "1",
    "1.5",
    "1e3",
    "a:",
    "a: b",
    "a #b",
    "'",
    '"',
    "ä\n",
    "x=[1]",
    "@a",
]


def decided(kind: str = "job", options: Options = OPTIONS, **wanted: Any) -> Submission:
    request = Request(Path("train.py"), **{"name": "first", "nodes": (2, 2), **wanted})
    return Kubernetes().decide(request, Options(**{**vars(options), "kind": kind}), {})


def test_a_manifest_has_no_secret() -> None:
    found = decided()
    assert "secretKeyRef" in found.text
    assert all(value not in found.text and value not in repr(found) for value in found.agents[0].environment.values())


def test_pods_meet_at_the_first_one() -> None:
    where = {kind: word for kind in KINDS for word in decided(kind).pods.command if word.endswith(":29500")}
    assert where == {
        "job": "first-0.first:29500",
        "jobset": "first-worker-0-0.first:29500",
        "trainjob": "first-node-0-0.first:29500",
    }


def test_the_job() -> None:
    service, job = KINDS["job"].write(decided(options=Options(image="i", gpus=2, volume="v"), grace_seconds=44.5).pods)
    assert service["spec"]["clusterIP"] == "None"
    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] >= 45
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "v"}} in pod["volumes"]
    assert "--resume auto" in " ".join(pod["containers"][0]["command"])  # the first pod, when it comes back


def test_fewest_and_most_pods() -> None:
    found = decided(nodes=(1, 3), workers=4)
    command = list(found.pods.command)
    assert [command[command.index(one) + 1] for one in ("--nodes", "--elastic", "-n")] == ["1:3", "4:12", "4"]
    assert len(found.agents) == 3


@pytest.mark.parametrize(
    ("options", "wanted", "said"),
    [
        (Options(), {}, "--image"),
        (Options(image="i", kind="pod"), {}, "--kind 'pod'"),
        (Options(image="i", gpus=0), {}, "--gpus 0"),
        (OPTIONS, {"secret_file": Path("s")}, "--secret-file"),
    ],
)
def test_what_cannot_be_submitted(options: Options, wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Kubernetes().decide(Request(Path("train.py"), **wanted), options, {})


def test_names() -> None:
    names = {name: object_name(name) for name in ("First_run.2", "9-lives", "x" * 80, "a" * 45 + "--b", "-")}
    assert names["First_run.2"] == "first-run-2" and names["9-lives"] == "run-9-lives"
    assert all(
        len(name) <= 46 and name[0].isalpha() and name[-1].isalnum() for name in names.values() if name != "run-"
    )


def test_yaml_says_what_was_meant() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    for kind in KINDS:
        found = decided(kind, arguments=tuple(TRICKY))
        assert list(yaml.safe_load_all(found.text)) == KINDS[kind].write(found.pods)


@pytest.mark.place
def test_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for one in KINDS["job"].write(decided(options=Options(image="i", gpus=2, volume="v")).pods):
        for version in ("1.31", "1.37"):
            validate.validate(one, version, strict=True)


@pytest.mark.place
def test_the_models_of_kubeflow() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow_trainer_api")
    (jobset,) = KINDS["jobset"].write(decided("jobset").pods)
    (trainjob,) = KINDS["trainjob"].write(decided("trainjob").pods)
    assert models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset
    assert models.TrainerV1alpha1TrainJob.from_dict(trainjob).to_dict() == trainjob


KUBECTL = """#!{python}
import json, os, sys, time
from pathlib import Path

folder = Path(os.environ["FAKE"])
words = sys.argv[1:]
given = sys.stdin.read() if "apply" in words else ""
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps([words, given]) + "\\n")
verb = next(word for word in words if word in ("get", "apply", "delete", "logs"))
if (folder / f"{{verb}}-error").exists():
    sys.exit((folder / f"{{verb}}-error").read_text())
applied, deleted = (folder / "applied"), (folder / "deleted")
if verb == "apply":
    applied.touch()
elif verb == "delete":
    deleted.touch()
elif verb == "logs":
    print("hello from the pod", flush=True)
elif applied.exists() and not deleted.exists():
    print((folder / ("pods.json" if "pods" in words else "job.json")).read_text())
"""


class Fake:
    """A ``kubectl`` on PATH; the cluster's answers are files."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder, self._server = folder, server
        program = folder / "bin" / "kubectl"
        program.parent.mkdir()
        program.write_text(KUBECTL.format(python=sys.executable))
        program.chmod(0o755)
        (folder / "train.py").write_text("")
        self.answer({}, [])

    def answer(self, job: dict[str, Any], pods: list[dict[str, Any]]) -> None:
        for name, one in (("job", {"status": job}), ("pods", {"items": pods})):
            (self.folder / f"{name}.new").write_text(json.dumps(one))
            (self.folder / f"{name}.new").rename(self.folder / f"{name}.json")

    def start(self, *options: str, path: str | None = None) -> Forked:
        words = "run", "--on", "kubernetes", "--image", "registry.example/train:1", "--name", "first", *options
        path = path or f"{self.folder / 'bin'}:{os.environ['PATH']}"
        environment = {**os.environ, "FAKE": str(self.folder), "PATH": path}
        out, err = self.folder / "out", self.folder / "err"
        command = Command((*PACELINE, *words, "train.py"), environment, out, err, self.folder)
        (process,) = self._server.start([command])
        return process

    def end(self, process: Forked) -> tuple[int, str, str]:
        code = process.wait(120.0)
        return code, (self.folder / "out").read_text(), (self.folder / "err").read_text()

    def run(self, *options: str, path: str | None = None) -> tuple[int, str, str]:
        return self.end(self.start(*options, path=path))

    def calls(self, verb: str) -> list[list[Any]]:
        file = self.folder / "calls"
        whole, _, _ = (file.read_text() if file.exists() else "").rpartition("\n")  # one may be on its way
        found = map(json.loads, whole.splitlines())
        return [one for one in found if verb in one[0]]


@pytest.fixture
def fake(tmp_path: Path, fork_server: ForkServer) -> Fake:
    return Fake(tmp_path, fork_server)


def pod(index: int, phase: str, state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(index)}
    about = {
        "name": f"first-{index}-x",
        "uid": f"u{index}",
        "labels": labels,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": about, "status": {"phase": phase, "containerStatuses": [{"state": state or {}}], **status}}


def ended(code: int, when: str = "2026-01-01T00:01:00Z") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "finishedAt": when}}


def condition(kind: str, **more: str) -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": "True", **more}]}


def test_a_run_to_its_end(fake: Fake) -> None:
    fake.answer(condition("Complete"), [pod(0, "Succeeded", ended(0)), pod(1, "Running")])
    code, out, err = fake.run("--namespace", "ml")
    assert code == 0, err
    assert out == "hello from the pod\n"
    ((words, given),) = fake.calls("apply")
    assert words[:2] == ["--namespace", "ml"]
    nothing, secret, manifest = f"\n{given}".split("\n---\n", 2)
    assert not nothing
    assert len(json.loads(secret)["stringData"]["PACELINE_SECRET"]) >= 32
    assert '"completionMode": "Indexed"' in manifest
    assert any({"job/first", "service/first", "secret/first"} <= set(call) for call, _ in fake.calls("delete"))


def test_a_run_that_fails_in_another_pod(fake: Fake) -> None:
    told = condition("Failed", reason="PodFailurePolicy", message="exit code 2")
    pods = [pod(0, "Failed", ended(75, "2026-01-01T00:02:00Z")), pod(1, "Failed", ended(2))]
    fake.answer(told, pods)
    code, _, err = fake.run()
    assert code == 2
    assert "[first-1-x] hello from the pod" in err
    assert "job first failed: PodFailurePolicy: exit code 2" in err
    assert fake.calls("delete")


def test_an_image_that_cannot_be_pulled(fake: Fake) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    fake.answer({}, [pod(0, "Pending", waiting)])
    code, _, err = fake.run()
    assert code == 3
    assert "Pod first-0-x cannot start: image registry.example/train:1: the image cannot be pulled" in err
    assert fake.calls("delete")


def test_a_cluster_without_room(fake: Fake) -> None:
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: cpu."}
    fake.answer({}, [pod(0, "Pending", conditions=[full])])
    code, _, err = fake.run("--patience", "0")
    assert code == 3
    assert "waits for a node: 0/3 nodes: cpu." in err and "No node had room" in err
    assert fake.calls("delete")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_lets_the_pods_save(fake: Fake, number: signal.Signals, code: int) -> None:
    fake.answer({}, [pod(0, "Running")])
    process = fake.start()
    deadline = time.monotonic() + 60
    while not fake.calls("logs"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    found, _, err = fake.end(process)
    assert found == code, err
    assert "stopping" in err
    assert "--cascade=foreground" in fake.calls("delete")[0][0]
    assert not any("--force" in words for words, _ in fake.calls("delete"))


def test_detached(fake: Fake) -> None:
    code, _, err = fake.run("--detach")
    assert code == 0
    assert "submitted job first" in err and "kubectl delete job/first service/first secret/first" in err
    assert not fake.calls("delete")


def test_a_run_of_this_name_is_there(fake: Fake) -> None:
    (fake.folder / "applied").touch()
    code, _, err = fake.run()
    assert code == 2
    assert "There is a job first already" in err
    assert not fake.calls("apply") and not fake.calls("delete")


@pytest.mark.parametrize(
    ("verb", "error", "said"),
    [
        ("get", 'error: context "x" does not exist', "kubectl config get-contexts"),
        ("get", "The connection to the server localhost:8080 was refused - did you ...?", "kubectl knows no cluster"),
        ("apply", 'jobs.batch is forbidden: User "u" cannot create resource', "kubectl auth can-i"),
        ("get", 'error: the server doesn\'t have a resource type "jobset"', "--kind job needs none"),
    ],
)
def test_errors_of_kubectl(fake: Fake, verb: str, error: str, said: str) -> None:
    (fake.folder / f"{verb}-error").write_text(error)
    code, _, err = fake.run()
    assert code == 3
    assert error.removeprefix("error: ") in err and said in err


def test_no_kubectl(fake: Fake) -> None:
    code, _, err = fake.run(path="/nowhere")
    assert code == 3
    assert "kubectl, which is not installed here" in err


def test_what_pods_say() -> None:
    waiting = pod(2, "Pending", {"waiting": {"reason": "ContainerCreating"}})
    (found,) = state.pods_of({"items": [waiting]})
    assert (found.index, found.hopeless, found.code, found.started) == (2, None, None, False)
    early, late = pod(1, "Failed", ended(3, "2026-01-01T00:00:09Z")), pod(0, "Failed", ended(5))
    failed = state.failed_pod(state.pods_of({"items": [late, early]}))
    assert failed is not None and state.exit_code(failed) == 3
    assert state.exit_code(None) == 5
    assert state.end_of({}) is None
