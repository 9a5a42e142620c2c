"""Where pictures live while a network trains: on the device if they fit, else on the host and fetched ahead of time."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

Keep = Literal["auto", "device", "host"]
SHARE = 0.4  # of the free memory; the network, its gradients and the solver's history need the rest


def stays_on_device(images: Tensor, device: torch.device, keep: Keep, beside: int = 0) -> bool:
    """Whether the pictures, and so many bytes beside them, are to be held on ``device``.

    ``"auto"`` asks how much memory is free.
    """
    if keep != "auto":
        return keep == "device"
    if device.type == "cpu":
        return True
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return images.numel() + beside <= SHARE * free


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move without waiting. From pageable memory the host would wait for the copy, so the way leads through pinned."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fetched(
    sources: Sequence[Tensor], rows: Iterator[Tensor], device: torch.device
) -> Generator[list[Tensor], None, None]:
    """For each batch of row numbers (on the host) these rows of every source on ``device``; the next are fetched
    meanwhile.

    A thread picks the rows into pinned memory and starts the copy on a stream of its own; the stream that computes
    waits for the copy's event, the host waits for nothing but the thread.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fetch(wanted: Tensor) -> tuple[list[Tensor], torch.cuda.Event | None]:
        if stream is None:
            return [source.index_select(0, wanted).to(device) for source in sources], None
        pinned = [torch.empty((len(wanted), *one.shape[1:]), dtype=one.dtype, pin_memory=True) for one in sources]
        for source, copy in zip(sources, pinned, strict=True):
            torch.index_select(source, 0, wanted, out=copy)
        with torch.cuda.stream(stream):
            return [copy.to(device, non_blocking=True) for copy in pinned], stream.record_event()

    with ThreadPoolExecutor(1) as pool:
        coming = deque(pool.submit(fetch, wanted) for wanted in itertools.islice(rows, 1))
        while coming:
            coming.extend(pool.submit(fetch, wanted) for wanted in itertools.islice(rows, 1))
            yield _arrived(*coming.popleft().result())


def _arrived(batch: list[Tensor], copied: torch.cuda.Event | None) -> list[Tensor]:
    if copied is not None:
        current = torch.cuda.current_stream(batch[0].device)
        current.wait_event(copied)
        for part in batch:  # its memory was taken on the other stream: not to be reused before we are done
            part.record_stream(current)
    return batch
