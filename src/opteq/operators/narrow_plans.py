"""How convolutions of 16 bits, and derivatives by their weights, are cut into programs of a GPU."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

# Pixels that are read at a time for a derivative by weights.
_PIXELS = 64


@dataclass(frozen=True)
class Plan:
    """How a convolution is cut into programs.

    Attributes:
        box: samples, rows and columns of pixels of one program, powers of two.
        boxes: how many cover all pixels.
        tile: channels of one program.
        tiles: how many cover all channels.
        depth: channels that are read at a time.
        stages: how many reads are under way.
        warps: of one program.
    """

    box: tuple[int, int, int]
    boxes: int
    tile: int
    tiles: int
    depth: int
    stages: int
    warps: int

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, batch: int, height: int, width: int, columns: int, rows: int, processors: int) -> Plan:
        """One for pictures of a size, by what was fastest on an H200 for those of 8, 16 and 32 pixels."""
        depth = next(depth for depth in (64, 32, 16) if columns % depth == 0)
        tile = 128 if rows > 64 else 64
        box = _box(256 if depth < 64 and tile == 64 else 128, batch, height, width)
        boxes, tiles = _covering(box, batch, height, width), -(-rows // tile)
        # Fewer stages leave room for a second program beside, where there is one.
        stages = 3 if tile == 128 and boxes * tiles > processors else 4
        return cls(box, boxes, tile, tiles, depth, stages, 4)


@dataclass(frozen=True)
class Sums:
    """How the derivative by a weight is cut into programs.

    Attributes:
        box: samples, rows and columns of pixels that are read at a time; they follow each other in memory.
        boxes: how many there are.
        parts: how many sums there are of every entry, to be added up.
        tile: output channels of one program.
        side: input channels of one program.
        stages: how many reads are under way.
        warps: of one program.
    """

    box: tuple[int, int, int]
    boxes: int
    parts: int
    tile: int
    side: int
    stages: int
    warps: int

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(
        cls, batch: int, channels: int, height: int, width: int, rows: int, taps: int, processors: int
    ) -> Sums | None:
        """One for pictures of a size; None where they can't be cut into such boxes."""
        samples, high = (1, _PIXELS // width) if width * height >= _PIXELS else (_PIXELS // (width * height), height)
        box = (samples, high, width)
        if math.prod(box) != _PIXELS or any(side & (side - 1) for side in box) or height % high or batch % samples:
            return None
        boxes = batch * height * width // _PIXELS
        tile, side = 128 if rows > 64 else 64, 128 if channels > 64 else 64
        programs = taps * -(-rows // tile) * -(-channels // side)
        parts = max(1, min(2 * processors // programs, boxes // 8))
        return cls(box, boxes, parts, tile, side, 3 if tile * side > 128 * 64 else 4, 4)


def _box(pixels: int, batch: int, height: int, width: int) -> tuple[int, int, int]:
    """Samples, rows and columns, powers of two with a given product, such that few pixels lie outside of pictures."""
    powers = [1 << power for power in range(pixels.bit_length())]
    boxes = [(pixels // (high * wide), high, wide) for high in powers for wide in powers if high * wide <= pixels]
    return min(boxes, key=lambda box: (_covering(box, batch, height, width), -box[2], -box[1]))


def _covering(box: tuple[int, int, int], *size: int) -> int:
    """How many boxes cover a batch."""
    return math.prod(-(-whole // side) for whole, side in zip(size, box, strict=True))


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs a device works on at a time, if each needs all of a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
