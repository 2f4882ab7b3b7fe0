"""``paceline trace --otel``: what a collector gets, read with OpenTelemetry's own messages."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from event_files import mark, mark_step

from paceline.cli.main import main
from paceline.observe.tracing import otel

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

KINDS = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector, which refuses what is sent below /closed, and the messages that it has got."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if kind := KINDS.get(self.path.removeprefix("/otlp")):
                got.append(kind.FromString(data))
            self.send_response(200 if kind else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{listening.server_address[1]}", got
        listening.shutdown()
        thread.join()


@pytest.fixture
def trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Trace a run of two workers; its exit code, output and errors."""
    run = tmp_path / "first"
    for number in range(3):
        mark(
            run, 0, "exchange", 10.0 * number + 8.0, step=number, what="gradients", bytes=64, seconds=2.0, more={"a": 1}
        )
        mark(run, 0, "send", 10.0 * number + 5.0, step=number, microbatch=0, stage=0, peer=1, seconds=1.0)
        mark(run, 1, "receive", 10.0 * number + 6.0, step=number, microbatch=0, stage=1, peer=0, seconds=3.0)
        mark_step(run, 2, number, end=10.0 * number + 9.0, seconds=8.0)
    mark(run, 0, "checkpoint", 30.0, step=2, path="x \ud800", bytes=8, stall=0.5, seconds=1.0)

    def command(*options: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["trace", str(run), *options])
        return int(ended.value.code or 0), *capsys.readouterr()

    return command


def spans_of(got: list[Any]) -> dict[tuple[str, str, int], Any]:
    """Spans by worker, name and trace."""
    return {
        (attribute.value.string_value, span.name, span.trace_id): span
        for message in got
        if isinstance(message, ExportTraceServiceRequest)
        for of_worker in message.resource_spans
        for attribute in of_worker.resource.attributes
        if attribute.key == "service.instance.id"
        for scope in of_worker.scope_spans
        for span in scope.spans
    }


def test_spans_of_a_step_are_a_trace(
    trace: Callable[..., tuple[int, str, str]], collector: tuple[str, list[Any]], tmp_path: Path
) -> None:
    url, got = collector
    assert trace("--otel", url)[:2] == (
        0,
        f"16 slices of rank 0, rank 1\nSent to {url}: 16 spans and 6 points of metrics\n",
    )
    assert not (tmp_path / "first" / "trace.pftrace").exists()
    spans = spans_of(got)
    assert len(spans) == 16 and len({one.span_id for one in spans.values()}) == 16
    names = {name: {key[2] for key in spans if key[1] == name} for _, name, _ in spans}
    assert all(len(names[f"step {number}"]) == 1 for number in range(3))  # both workers' steps are in one trace
    (seventh,) = names["step 1"]
    step, exchange = spans["rank 0", "step 1", seventh], spans["rank 0", "exchange gradients", seventh]
    sent = spans["rank 0", "send stage 0 microbatch 0", seventh]
    received = spans["rank 1", "receive stage 1 microbatch 0", seventh]
    assert (step.end_time_unix_nano - step.start_time_unix_nano, step.parent_span_id) == (8 * 10**9, b"")
    assert exchange.parent_span_id == sent.parent_span_id == step.span_id
    assert received.parent_span_id == spans["rank 1", "step 1", seventh].span_id
    assert [link.span_id for link in received.links] == [sent.span_id]
    values = {one.key: one.value for one in exchange.attributes}
    assert values["paceline.bytes"].int_value == 64 and values["paceline.more"].string_value == '{"a": 1}'


def test_metrics(trace: Callable[..., tuple[int, str, str]], collector: tuple[str, list[Any]]) -> None:
    url, got = collector
    trace("--otel", f"{url}/otlp/", "--step", "1:3")
    (message,) = (one for one in got if isinstance(one, ExportMetricsServiceRequest))
    gauges = [metric for one in message.resource_metrics for scope in one.scope_metrics for metric in scope.metrics]
    assert [one.name for one in gauges] == ["paceline.loss"] * 2
    assert [point.as_double for one in gauges for point in one.gauge.data_points] == [0.5] * 4


def test_a_run_that_is_sent_again_has_the_same_spans(
    trace: Callable[..., tuple[int, str, str]], collector: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, got = collector
    trace("--otel", url)
    once = spans_of(got)
    got.clear()
    monkeypatch.setattr(otel, "_BATCH", 3)
    trace("--otel", url)
    assert len(got) == 6 + 2
    assert {key: one.span_id for key, one in spans_of(got).items()} == {key: one.span_id for key, one in once.items()}


def test_a_collector_that_does_not_take_the_data(
    trace: Callable[..., tuple[int, str, str]], collector: tuple[str, list[Any]]
) -> None:
    code, _, errors = trace("--otel", f"{collector[0]}/closed")
    assert code == 2 and "did not take the data (0 of 16 were sent)" in errors


@pytest.mark.parametrize("url", ["localhost:4318", "http://", "ftp://host"])
def test_what_is_no_collector(trace: Callable[..., tuple[int, str, str]], url: str) -> None:
    code, _, errors = trace("--otel", url)
    assert code == 2 and "give the URL of a collector" in errors


def test_a_file_is_not_written_as_well(trace: Callable[..., tuple[int, str, str]]) -> None:
    code, _, errors = trace("--otel", "http://localhost:4318", "--output", "file")
    assert code == 2 and "--output has no effect with --otel" in errors
