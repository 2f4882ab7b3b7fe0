"""Export of a trace to OpenTelemetry: slices as spans, counters as gauges, by the OTLP exporters of its SDK.

::

    trace of step 7   rank 0  step 7 ──┬── exchange gradients
                                       └── send ───────┐ link
                      rank 1  step 7 ───── receive ────┘

All workers' spans of a step are one trace, because back ends hold a trace in memory. Spans and points are made from
records, with their times, so the SDK's tracers and meters, which use the current time, take no part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import ConfigError, InputError
from paceline.observe.records import encodable
from paceline.observe.tracing.slices import Slice, Worker

_BATCH = 500
_SECONDS = 10  # spans or points of a request, and its deadline with all attempts


def send(workers: Mapping[str, Worker], run: Path, endpoint: str) -> tuple[int, int]:
    """Send the slices and counters of a run to a collector by OTLP over HTTP. Return their numbers.

    Args:
        endpoint: base URL of the collector, such as ``http://localhost:4318``.

    Raises:
        InputError: the collector did not take the data.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
    except ImportError:
        raise ConfigError("--otel needs OpenTelemetry: install it with pip install 'paceline[otel]'.") from None
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"--otel {endpoint!r}: give the URL of a collector, as in --otel http://localhost:4318.")
    about = {"service.name": "paceline", "paceline.run": encodable(run.name)}
    resources = {name: Resource({**about, "service.instance.id": encodable(name)}) for name in workers}
    spans = _spans(workers, resources, str(run.resolve()))
    points = [
        (name, counter, time, value)
        for name, worker in workers.items()
        for counter, values in worker.counters.items()
        for time, value in sorted(values)
    ]
    base = endpoint.rstrip("/")
    _export(OTLPSpanExporter(f"{base}/v1/traces", timeout=_SECONDS), spans, list, endpoint)
    _export(
        OTLPMetricExporter(f"{base}/v1/metrics", timeout=_SECONDS),
        points,
        lambda some: _metrics(some, resources),
        endpoint,
    )
    return len(spans), len(points)


def _export(exporter: Any, items: Sequence[Any], encode: Callable[[Sequence[Any]], Any], endpoint: str) -> None:
    """Send items in batches. The exporter tries again until its deadline, and logs why it gave up."""
    try:
        for begin in range(0, len(items), _BATCH):
            if exporter.export(encode(items[begin : begin + _BATCH])).name != "SUCCESS":
                raise InputError(
                    f"The collector at {endpoint} did not take the data ({begin} of {len(items)} were sent). Check "
                    f"that it runs, and that this is the address of its receiver for OTLP over HTTP."
                )
    finally:
        exporter.shutdown()


def _spans(workers: Mapping[str, Worker], resources: Mapping[str, Any], run: str) -> list[Any]:
    """Return the slices as spans. A span of a step's part is a child of its worker's step, if that is known."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, SpanContext, TraceFlags

    slices = [
        (name, track, one) for name, worker in workers.items() for track, some in worker.tracks.items() for one in some
    ]
    contexts, steps, senders = [], {}, {}
    for name, track, one in slices:
        step = one.values.get("step")
        context = SpanContext(
            _number(16, run, step), _number(8, run, name, track, one.name, one.begin), False, TraceFlags(1)
        )
        contexts.append(context)
        if one.name == f"step {step}":
            steps[name, step] = context
        if one.sends is not None:
            senders[one.sends] = context
    spans = []
    for (name, track, one), context in zip(slices, contexts, strict=True):
        parent = steps.get((name, one.values.get("step")))
        sender = None if one.receives is None else senders.get(one.receives)
        spans.append(
            ReadableSpan(
                encodable(one.name),
                context,
                parent=None if parent is context else parent,
                resource=resources[name],
                attributes={"paceline.track": track, **_attributes(one)},
                links=[] if sender is None else [Link(sender)],
                start_time=max(0, one.begin),
                end_time=max(0, one.end),
            )
        )
    return spans


def _metrics(points: Sequence[tuple[str, str, int, float]], resources: Mapping[str, Any]) -> Any:
    from opentelemetry.sdk.metrics.export import (
        Gauge,
        Metric,
        MetricsData,
        NumberDataPoint,
        ResourceMetrics,
        ScopeMetrics,
    )
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    gauges: dict[str, dict[str, list[Any]]] = {}
    for name, counter, time, value in points:
        gauges.setdefault(name, {}).setdefault(counter, []).append(NumberDataPoint({}, 0, max(0, time), value))
    return MetricsData(
        [
            ResourceMetrics(
                resources[name],
                [
                    ScopeMetrics(
                        InstrumentationScope("paceline"),
                        [Metric(f"paceline.{counter}", "", "", Gauge(some)) for counter, some in of_worker.items()],
                        "",
                    )
                ],
                "",
            )
            for name, of_worker in gauges.items()
        ]
    )


def _number(size: int, *parts: object) -> int:
    """Return a number of that many bytes which is the same whenever the same run is sent. It is never 0."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:size], "big") or 1


def _attributes(one: Slice) -> dict[str, str | bool | int | float]:
    """Return the fields of a record, as JSON if OpenTelemetry has no such type."""
    known: dict[str, str | bool | int | float] = {}
    for key, value in one.values.items():
        plain = isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**63)
        text = value if isinstance(value, str) else json.dumps(value)
        known[f"paceline.{encodable(key)}"] = value if plain else encodable(text)
    return known
