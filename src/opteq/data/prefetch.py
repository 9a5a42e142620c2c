"""Where images are kept during training: on the device if they fit, else on the host with prefetching."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

Residency = Literal["auto", "device", "host"]
SHARE = 0.4  # of the free memory; the network, its gradients and the solver's history need the rest


def fits_on_device(images: Tensor, device: torch.device, keep: Residency, beside: int = 0) -> bool:
    """Whether the images and ``beside`` bytes more should stay on ``device``; ``"auto"`` looks at its free memory."""
    if keep != "auto":
        return keep == "device"
    if device.type == "cpu":
        return True
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return images.numel() + beside <= SHARE * free


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy asynchronously, through pinned memory: a copy from pageable memory would block the host."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def prefetch(
    sources: Sequence[Tensor], rows: Iterator[Tensor], device: torch.device
) -> Generator[list[Tensor], None, None]:
    """Yield, for each batch of row indices, these rows of every source on ``device``, one batch ahead.

    A thread gathers the rows into pinned memory and starts the copy on a side stream; the current stream waits for the
    copy's event. The host waits for the thread only.
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
            yield _wait_for(*coming.popleft().result())


def _wait_for(batch: list[Tensor], copied: torch.cuda.Event | None) -> list[Tensor]:
    if copied is not None:
        current = torch.cuda.current_stream(batch[0].device)
        current.wait_event(copied)
        for part in batch:  # allocated on the side stream: not to be reused before this stream is done
            part.record_stream(current)
    return batch
