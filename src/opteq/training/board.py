"""TensorBoard's file: numbers by tag and epoch."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Board:
    """Writes scalars to a new event file in ``folder``.

    torch's own writer hands everything to a thread, where a full disk ends in a traceback that nobody can catch. One
    write an epoch needs no thread, and an error is raised where it can be told.

    Args:
        folder: made where it is missing.
        done: how many epochs are finished already. TensorBoard then forgets what an interrupted run drew beyond them.
    """

    def __init__(self, folder: Path, done: int = 0) -> None:
        # Imported here: TensorBoard is slow to import, and only a run that writes needs it.
        from tensorboard.compat.proto.event_pb2 import (  # type: ignore[import-untyped,unused-ignore]
            Event,
            SessionLog,
        )
        from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped,unused-ignore]
            RecordWriter,
        )

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._writer = RecordWriter(open(folder / name, "xb"))  # noqa: SIM115 - open for as long as the run is
        self._event = Event
        beginning = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if done:
            restart = SessionLog(status=SessionLog.START)
            beginning.append(Event(wall_time=time.time(), step=done + 1, session_log=restart))
        try:
            self._write(*beginning)
        except OSError:
            self.close()
            raise

    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        """Draw one point of every tag."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped,unused-ignore]

        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(self._event(wall_time=time.time(), step=epoch, summary=Summary(value=points)))

    def close(self) -> None:
        """Finish the file. What a full disk refused was told when it was written."""
        with contextlib.suppress(OSError):
            self._writer.close()

    def _write(self, *events: Any) -> None:
        for event in events:
            self._writer.write(event.SerializeToString())
        self._writer.flush()
