"""Gradients of one optimizer in fixed buckets, reduced in a fixed order without negotiation.

After two steps the workers agree on a plan if their optimizers have the same parameters. From then on a bucket is sent
as soon as it is full and the buckets before it have been sent, over a process group for the plan alone::

    backward     g9 g8 g7 g6 │ g5 g4 g3 │ g2 g1 g0
    bucket 0                 └──────
    bucket 1                            └──────
    bucket 2                                       └──────   and one number: workers that leave the plan

A worker that joins (``hvd.join``) sends zeros and a flag that it leaves. All workers see the flag at the end of the
same step and return to negotiation, in which the joined worker contributes zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.comm.reduction.buckets import split
from paceline.horovod.engine.operations import start_all_reduce
from paceline.horovod.engine.requests import Request
from paceline.horovod.engine.waits import Waits
from paceline.schedule.link_shares import SMALLEST_BUCKET

_FIRST_BYTES = 1 << 20


class _Bucket:
    """Gradients packed into one vector."""

    def __init__(self, parameters: list[torch.Tensor], dtype: torch.dtype, extra: int) -> None:
        sizes = [one.numel() for one in parameters]
        self.flat = torch.zeros(sum(sizes) + extra, dtype=dtype)
        parts = self.flat[: sum(sizes)].split(sizes)
        self.views = {one: part.view(one.shape) for one, part in zip(parameters, parts, strict=True)}
        self.missing = set(parameters)
        self.work: dist.Work | None = None


class Plan:
    """Buckets of one optimizer.

    Args:
        group: process group used by this plan alone.
        parameters: parameters with their names, in the order in which their gradients are expected.
        dtype: dtype of transferred gradients. None keeps their own dtype, which must be the same for all.
    """

    def __init__(
        self,
        watch: Waits,
        group: dist.ProcessGroup,
        parameters: Sequence[tuple[torch.Tensor, str]],
        dtype: torch.dtype | None,
        factors: tuple[float, float],
        set_: int,
    ) -> None:
        self._watch, self._group, self._set = watch, group, set_
        self._before, self._after = factors
        self._names = dict(parameters)
        ordered = [one for one, _ in parameters]
        dtype = dtype or ordered[0].dtype
        wider = ordered[0].dtype.itemsize // dtype.itemsize  # than what is transferred
        runs = split(ordered, wider * SMALLEST_BUCKET, wider * _FIRST_BYTES)
        last = len(runs) - 1
        self._buckets = [
            _Bucket([ordered[one] for one in run], dtype, extra=place == last) for place, run in enumerate(runs)
        ]
        self._bucket_of = {one: bucket for bucket in self._buckets for one in bucket.views}
        self._started = 0
        self.open = True

    def add(self, parameter: torch.Tensor) -> None:
        """Copy a parameter's final gradient of this step into its bucket, and send buckets that are full."""
        bucket = self._bucket_of[parameter]
        view, gradient = bucket.views[parameter], parameter.grad
        assert gradient is not None
        if self._before == 1.0:
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        else:
            torch.mul(gradient, self._before, out=view)
        bucket.missing.discard(parameter)
        if not bucket.missing:
            self._start_full()

    def _start_full(self) -> None:
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            bucket = self._buckets[self._started]
            if (timeline := self._watch.timeline) is not None:
                timeline.begin([self._request(bucket)])
            bucket.work = start_all_reduce(self._group, bucket.flat)
            self._started += 1

    def finish(self) -> None:
        """Finish a step: send zeros for missing gradients, wait, and write the results into the gradients.

        Raises:
            HorovodInternalError: another worker has left, or the deadline has passed.
        """
        self._send_rest()
        for bucket in self._buckets:
            self._wait(bucket)
            self._write(bucket)
        if self._buckets[-1].flat[-1] > 0:
            self.close()
        self._begin()

    def _send_rest(self) -> None:
        for bucket in self._buckets[self._started :]:
            for one in bucket.missing:
                bucket.views[one].zero_()
            bucket.missing.clear()
        self._start_full()

    def _wait(self, bucket: _Bucket) -> None:
        assert bucket.work is not None
        what = self._called(bucket)
        self._watch.waiting(what, self._set)
        try:
            bucket.work.wait()
        except RuntimeError as error:
            raise self._watch.await_cause(what, error) from error
        finally:
            self._watch.waited(what)
        if (timeline := self._watch.timeline) is not None:
            timeline.end([self._request(bucket)])

    def _called(self, bucket: _Bucket) -> str:
        name = self._names[next(iter(bucket.views))]
        return f"{name} and {len(bucket.views) - 1} more" if len(bucket.views) > 1 else name

    def _request(self, bucket: _Bucket) -> Request:
        """Return the request that a bucket would be if it were negotiated."""
        flat = bucket.flat
        dtype = str(flat.dtype).removeprefix("torch.")
        return Request(self._set, self._called(bucket), "allreduce", (dtype,), ((flat.numel(),),))

    def _write(self, bucket: _Bucket) -> None:
        for one, view in bucket.views.items():
            if one.grad is None or one.grad.is_sparse:
                one.grad = torch.empty_like(one)
            if self._after == 1.0:
                one.grad.copy_(view)
            elif one.grad.dtype == view.dtype:
                torch.mul(view, self._after, out=one.grad)
            else:
                one.grad.copy_(view).mul_(self._after)

    def _begin(self) -> None:
        self._started = 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.views)
            bucket.work = None
        self._buckets[-1].flat[-1:].zero_()

    def leave(self) -> None:
        """Send zeros and the flag that this worker leaves the plan, instead of a step's gradients."""
        if self.open:
            self._buckets[-1].flat[-1] = 1
            self._send_rest()
            self.open = False

    def close(self) -> None:
        self.open = False
        dist.destroy_process_group(self._group)
