"""TensorBoard: event files, which TensorBoard reads in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from paceline.adapters.trackers.base import TrackedRun, Tracker, Values
from paceline.adapters.trackers.png import size_of


class TensorBoardTracker(Tracker):
    """Tracker that writes a file for each start. TensorBoard drops later steps of earlier files."""

    def __init__(self, folder: Path, run: TrackedRun) -> None:
        before = set(folder.glob("events.*"))
        self._writer = SummaryWriter(str(folder), purge_step=run.position if before else None)
        self._files = sorted(set(folder.glob("events.*")) - before)
        if not before:
            rows = "".join(f"| {name} | {value} |\n" for name, value in run.about().items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)
        self._writer.flush()

    def write(self, values: Sequence[Values]) -> None:
        for one in values:
            for name, value in one.scalars.items():
                self._writer.add_scalar(name, value, one.step, one.time)
            for name, path in one.texts.items():
                self._writer.add_text(name, Path(path).read_text(), one.step, one.time)
            for name, path in one.images.items():
                self._writer._get_file_writer().add_summary(_image(name, Path(path).read_bytes()), one.step, one.time)
        self._writer.flush()

    def files(self) -> Sequence[Path]:
        """Return the file of this start."""
        return self._files

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _image(name: str, png: bytes) -> Summary:
    width, height, channels = size_of(png)
    image = Summary.Image(width=width, height=height, colorspace=channels, encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=name, image=image)])


def open_tracker(run: TrackedRun) -> Tracker:
    """Open the event files of a run."""
    return TensorBoardTracker(run.folder / "tensorboard", run)
