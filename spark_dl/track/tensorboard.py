"""Event files of TensorBoard in the folder of a run, written on the driver."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from spark_dl import storage
from spark_dl.rundir.run_folder import EVENT_FILE_END, TENSORBOARD
from spark_dl.spec import Run
from spark_dl.storage.owner import temporary_prefix
from spark_dl.track.events import Background, Event, metrics_of


def check() -> None:
    """Raises ValueError if the package is missing. Called on the driver."""
    try:
        import tensorboard  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            f"track.tensorboard: needs the package tensorboard on the driver ({error}); install spark_dl[tensorboard], "
            "or set it to false"
        ) from error


@contextlib.contextmanager
def tracking(run: Run, first_step: int) -> Iterator[Background]:
    """Yields a thread that writes the metrics of a run to an event file. Called on the driver.

    Args:
        first_step: the step that the run continues from. TensorBoard hides later steps of earlier attempts.
    """
    with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder:
        thread = None
        try:
            files = _EventFiles(run, first_step, folder)
            thread = Background(f"TensorBoard ({files.url})", files.write, files.close)
            yield thread
        finally:
            if thread is not None:
                thread.close("")


class _EventFiles:
    """The event file of an attempt. On remote storage, it is written at the end of each epoch, and at the end.

    Args:
        folder: a local folder for the file, if the run folder is remote.
    """

    def __init__(self, run: Run, first_step: int, folder: str):
        from torch.utils.tensorboard import SummaryWriter

        self.url = storage.within(run.run_dir, TENSORBOARD)
        self._local = None if storage.is_local(run.run_dir) else folder
        if self._local is None:
            storage.make_folder(self.url)  # private, as TensorBoard's own folder would not be
        self._writer: Any = SummaryWriter(
            self._local or storage.absolute(self.url), purge_step=first_step + 1, filename_suffix=EVENT_FILE_END
        )
        settings = yaml.safe_dump(run.config.to_dict(), sort_keys=False)
        indented = "".join(f"    {line}\n" for line in settings.splitlines())  # a block of code in Markdown
        self._writer.add_text("settings", indented, first_step)
        self._writer.flush()

    def write(self, events: Sequence[Event]) -> None:
        """Writes the metrics of events."""
        for event in events:
            for name, value in metrics_of(event).items():
                self._writer.add_scalar(name, value, event["step"], walltime=event["time"])
        self._writer.flush()
        if any(event["kind"] == "epoch" for event in events):
            self._upload()

    def close(self, status: str) -> None:
        """Closes the file."""
        self._writer.close()
        self._upload()

    def _upload(self) -> None:
        if self._local is not None:
            for name in os.listdir(self._local):
                with open(os.path.join(self._local, name), "rb") as file:
                    storage.write_bytes(storage.join(self.url, name), file.read())
