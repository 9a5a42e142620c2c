"""Images that are decoded when they are needed, by worker processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from opteq.common.errors import UserError
from opteq.data.dataset import ChannelStatistics, Dataset, Split
from opteq.data.prefetch import to_device
from opteq.data.readers.decode import Decoder, in_pieces
from opteq.data.readers.files import Files, Listing

AHEAD = 2  # batches that each worker prepares before they are asked for
SAMPLE = 1024  # images that mean and std are taken from
MOST_WORKERS = 8  # by default
PATIENCE = 60.0  # seconds that a worker goes on after SIGTERM


@dataclass(frozen=True)
class StreamedImages:
    """uint8 images ``(N, 3, h, w)`` that stay in their files: indexing decodes.

    In the place of :class:`~opteq.data.Split`'s tensor of images. It holds names and no pixels, so memory does not grow
    with the number of images.

    Args:
        files: where they are.
        decoder: makes pixels of them.
        workers: processes that decode; 0 decodes in this process.
    """

    files: Files
    decoder: Decoder = field(repr=False)
    workers: int

    dtype: torch.dtype = field(default=torch.uint8, init=False)
    ndim: int = field(default=4, init=False)

    @property
    def shape(self) -> torch.Size:
        """``(N, 3, h, w)``."""
        return torch.Size((len(self.files), *self.decoder.shape))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """The images ``rows``, decoded here."""
        wanted = torch.as_tensor(rows)
        images = torch.empty((wanted.numel(), *self.decoder.shape), dtype=torch.uint8)
        pixels = images.numpy()
        for place, row in enumerate(wanted.reshape(-1).tolist()):
            pixels[place] = self.decoder(self.files, row)
        return images.reshape(*wanted.shape, *self.decoder.shape)

    def batches(self, rows: Iterator[Tensor], device: torch.device) -> Generator[Tensor, None, None]:
        """For each batch of row indices these images on ``device``, in order, decoded ahead by the workers."""
        from torch.utils.data import DataLoader  # imported here: it loads torch's compiler

        pinned = device.type == "cuda"
        loader: DataLoader[Tensor | str] = DataLoader(
            _BatchDecoder(self),  # type: ignore[arg-type]
            batch_sampler=rows,  # type: ignore[arg-type]
            num_workers=self.workers,
            prefetch_factor=AHEAD if self.workers else None,
            collate_fn=_identity,  # type: ignore[arg-type]
            worker_init_fn=_init_worker,
            pin_memory=pinned and self.workers > 0,
            generator=torch.Generator(),  # for its seed, which would be drawn from training's random numbers otherwise
        )
        arriving = iter(loader)
        while True:
            try:
                batch = next(arriving)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:  # torch's, or that of a broken connection
                if isinstance(error, RuntimeError) and not any(word in str(error) for word in ("killed", "exited")):
                    raise
                raise UserError(
                    "a process that decodes images was killed, often for lack of memory; "
                    f"take fewer than {self.workers} by data.workers, or smaller batches"
                ) from error
            if isinstance(batch, str):
                raise UserError(batch)
            yield batch.to(device, non_blocking=True) if batch.is_pinned() else to_device(batch, device)


class _BatchDecoder:
    """The data set that the workers see: it is asked for whole batches."""

    def __init__(self, images: StreamedImages) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, rows: Tensor) -> Tensor | str:
        from torch.utils.data import default_collate

        decoder, files = self.images.decoder, self.images.files
        if len(rows) == 0:  # the share of a process where a batch has fewer images than there are processes
            return self.images[rows]
        try:
            # Stacked in memory that processes share: a batch on the heap would be copied there, and leave holes that
            # make a worker grow by gigabytes.
            batch: Tensor = default_collate([torch.from_numpy(decoder(files, row).copy()) for row in rows.tolist()])
            return batch
        except UserError as error:  # as text: an exception would arrive with the worker's traceback in its message
            return str(error)


def _identity(batch: Tensor | str) -> Tensor | str:
    return batch


def _init_worker(_: int) -> None:
    """Signals are for the process that trains: it ends its workers.

    Terminals, timeouts and schedulers send a signal to all processes alike. If workers ended at once, the one that
    trains would fail instead of saving a checkpoint.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGHUP"):  # not on Windows
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_later)


def _leave_later(number: int, _: object) -> None:
    timer = threading.Timer(PATIENCE, os._exit, (128 + number,))
    timer.daemon = True  # a worker whose work is done does not wait for it
    timer.start()


def stream_dataset(name: str, splits: tuple[Listing, ...], image_size: int | None, workers: int | None) -> Dataset:
    """A data set of listings, without decoding more than a sample for mean and std."""
    if workers is None:
        workers = min(MOST_WORKERS, os.cpu_count() or 1)
    train = splits[0]
    decoder = Decoder.like(train.files, 0, image_size)
    streamed = [
        Split(StreamedImages(listing.files, decoder, workers), torch.from_numpy(listing.labels)) for listing in splits
    ]
    statistics = ChannelStatistics(decoder.shape[0])
    sample = np.unique(np.linspace(0, len(train.files) - 1, SAMPLE).round().astype(np.int64)).tolist()
    for piece in in_pieces(sample, decoder.shape, lambda row: decoder(train.files, row), os.cpu_count() or 1):
        statistics.add(piece)
    mean, std = statistics.statistics()
    unseen = streamed[2] if len(streamed) > 2 else None
    return Dataset(name, train.classes, streamed[0], streamed[1], mean, std, unseen)
