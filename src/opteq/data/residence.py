"""Where pictures live while a network trains: on the device if they fit, else on the host and fetched ahead of time."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

Keep = Literal["auto", "device", "host"]
SHARE = 0.4  # of the free memory; the network, its gradients and the solver's history need the rest


def stays_on_device(images: Tensor, device: torch.device, keep: Keep) -> bool:
    """Whether the pictures are to be held on ``device``; ``"auto"`` asks how much memory is free."""
    if keep != "auto":
        return keep == "device"
    if device.type == "cpu":
        return True
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return images.numel() <= SHARE * free


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move without waiting. From pageable memory the host would wait for the copy, so the way leads through pinned."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fetched(images: Tensor, rows: Iterator[Tensor], device: torch.device) -> Generator[Tensor, None, None]:
    """For each batch of row numbers (on the host) its pictures on ``device``; the next batch is fetched meanwhile.

    A thread picks the rows into pinned memory and starts the copy on a stream of its own; the stream that computes
    waits for the copy's event, the host waits for nothing but the thread.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fetch(wanted: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if stream is None:
            return images.index_select(0, wanted).to(device), None
        pinned = torch.empty((len(wanted), *images.shape[1:]), dtype=images.dtype, pin_memory=True)
        torch.index_select(images, 0, wanted, out=pinned)
        with torch.cuda.stream(stream):
            batch = pinned.to(device, non_blocking=True)
            return batch, stream.record_event()

    with ThreadPoolExecutor(1) as pool:
        coming = deque(pool.submit(fetch, wanted) for wanted in itertools.islice(rows, 1))
        while coming:
            coming.extend(pool.submit(fetch, wanted) for wanted in itertools.islice(rows, 1))
            yield _arrived(*coming.popleft().result())


def _arrived(batch: Tensor, copied: torch.cuda.Event | None) -> Tensor:
    if copied is not None:
        current = torch.cuda.current_stream(batch.device)
        current.wait_event(copied)
        batch.record_stream(current)  # its memory was taken on the other stream: not to be reused before we are done
    return batch
