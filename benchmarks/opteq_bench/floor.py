"""The least that a step can cost: bytes and operations, counted from shapes, and the time they take at peak speed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """What a device can do at most: bytes a second, and operations a second in TensorFloat-32 and in bfloat16."""

    bandwidth: float
    tf32: float
    bf16: float

    def operations(self, precision: str) -> float | None:
        """Operations a second; None for a precision that the makers' table is not about."""
        return {"tf32": self.tf32, "bf16": self.bf16}.get(precision)


# From the makers' data sheets, dense arithmetic; the first name that a device's name contains counts.
_PEAKS = {
    "H200": Peak(4.8e12, 495e12, 989e12),
    "H100 80GB HBM3": Peak(3.35e12, 495e12, 989e12),
    "A100-SXM4-80GB": Peak(2.04e12, 156e12, 312e12),
}


def peak_of(device_name: str) -> Peak | None:
    """The peak of a device by its name, None where it is not known."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


@dataclass(frozen=True)
class Floor:
    """Bytes that have to be moved and operations that have to be done.

    >>> Floor(4.8e9, 1.0).milliseconds(peak_of("NVIDIA H200"), "tf32")
    1.0
    """

    bytes: float
    operations: float

    def __add__(self, other: Floor) -> Floor:
        return Floor(self.bytes + other.bytes, self.operations + other.operations)

    def __mul__(self, times: float) -> Floor:
        return Floor(self.bytes * times, self.operations * times)

    def milliseconds(self, peak: Peak | None, precision: str) -> float | None:
        """The longer of moving and computing, as if both overlapped perfectly; None where no peak is known."""
        speed = None if peak is None else peak.operations(precision)
        if peak is None or speed is None:
            return None
        return 1e3 * max(self.bytes / peak.bandwidth, self.operations / speed)


def convolution(channels: int, hidden: int, side: int, batch: int, width: int) -> Floor:
    """One 3x3 convolution between ``channels`` and ``hidden``: both pictures and the weight once, ``width`` bytes each.

    Its transpose and its two gradients cost the same.
    """
    pixels = side * side * batch
    weight = 9 * channels * hidden
    return Floor(width * ((channels + hidden) * pixels + weight), 2 * weight * pixels)


def layer_map(channels: int, hidden: int, side: int, batch: int, width: int) -> Floor:
    """``W' relu(W z + c)``: z, W and c read, y written and read again, z written."""
    pixels = side * side * batch
    weight = 9 * channels * hidden
    return Floor(width * ((2 * channels + 3 * hidden) * pixels + weight), 4 * weight * pixels)


def picard(step: Floor, entries: int, width: int) -> Floor:
    """A plain step: the map, and its point and image read once more for the residual."""
    return step + Floor(2 * entries * width, 0)


def anderson(step: Floor, entries: int, width: int, memory: int, column: int) -> Floor:
    """An Anderson step: the map, 6 vectors of states, and ``2 memory + 2`` columns of ``column`` bytes an entry.

    Every stored change of the residual is read for its inner product and every stored move for the mix; one of each is
    written.
    """
    return step + Floor(entries * (6 * width + (2 * memory + 2) * column), 0)


def conjugate_gradients(step: Floor, entries: int) -> Floor:
    """A step of conjugate gradients: one product, which costs what the map does, and 11 passes in float32.

    Two are for ``<p, Ap>``, six for the new answer and residual, three for the new direction.
    """
    return step + Floor(11 * entries * 4, 0)


def training(channels: int, hidden: int, side: int, batch: int, width: int, forward: float, backward: float) -> Floor:
    """A training step with ``forward`` Anderson and ``backward`` conjugate-gradient steps.

    Beside these, eleven convolutions: U and its two gradients; at the equilibrium one step, which is two, with two
    gradients of W and one of what is between them; the features, their gradient and that of W.
    """
    step = layer_map(channels, hidden, side, batch, width)
    entries = min(channels, hidden) * side * side * batch
    rest = convolution(channels, hidden, side, batch, width) * 11
    return anderson(step, entries, width, 5, 2) * forward + conjugate_gradients(step, entries) * backward + rest
