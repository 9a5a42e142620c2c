"""HSIC of large batches: random functions of the features instead of kernel matrices of the samples.

A Gaussian kernel of bandwidth s is an average over random waves: ``k(x, y) = E[f(x) f(y)]`` with
``f(x) = sqrt(2) cos(<w, x> / s + p)``, w standard normal, p uniform in [0, 2 pi). If f and g are independent,
then for two features ``E[(sum_b f~(x_b) g~(y_b))^2] = tr(K_x H K_y H)``, where ``~`` subtracts the mean over
the batch. So one draw of a function for *every* feature gives an unbiased estimate of every pair's HSIC at
once, from an m x m matrix of covariances; the mean over D draws has an error that falls as ``1 / sqrt(D)``.
It costs O(D m^2 B) where the exact sum costs O(m B^2), and needs no B x B matrix: worth while for batches
larger than D m.

Here ``x`` and ``v`` are ``(m, B, P)``: features, samples, entries of one feature of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from opteq.regularizers.base import chunk_size, without_diagonal

Word = TypeVar("Word", int, Tensor)


@dataclass(frozen=True)
class RandomFourier:
    """The estimate of ``sum_{i<j} HSIC`` from ``draws`` random functions of each feature, set by ``seed``."""

    bandwidth: float
    draws: int
    seed: int

    def value(self, x: Tensor) -> Tensor:
        """The estimate, a scalar."""
        total = x.new_zeros(())
        for frequency, phase in self._functions(x):
            waves = _centre(math.sqrt(2) * torch.cos(_project(x, frequency) + phase))
            total = total + without_diagonal(waves @ waves.mT).square().sum()
        return total * self._scale(x) / 2

    def gradient(self, x: Tensor) -> Tensor:
        """Its gradient, ``(m, B, P)``."""
        total = torch.zeros_like(x)
        for frequency, phase in self._functions(x):
            angle = _project(x, frequency) + phase
            waves = _centre(math.sqrt(2) * torch.cos(angle))
            slope = -math.sqrt(2) * torch.sin(angle)
            force = without_diagonal(waves @ waves.mT) @ waves
            total = total + _spread(force * slope, frequency)
        return total * 2 * self._scale(x)

    def curvature(self, x: Tensor, v: Tensor) -> Tensor:
        """Its Hessian times ``v``, ``(m, B, P)``."""
        total = torch.zeros_like(x)
        for frequency, phase in self._functions(x):
            angle = _project(x, frequency) + phase
            height = math.sqrt(2) * torch.cos(angle)
            waves, slope = _centre(height), -math.sqrt(2) * torch.sin(angle)
            covariance = without_diagonal(waves @ waves.mT)
            # From here on, `d_...` is the derivative of the quantity of that name along v.
            d_angle = _project(v, frequency)
            d_waves = _centre(slope * d_angle)
            half = without_diagonal(d_waves @ waves.mT)
            d_force = (half + half.mT) @ waves + covariance @ d_waves
            total = total + _spread(d_force * slope - covariance @ waves * height * d_angle, frequency)
        return total * 2 * self._scale(x)

    def _scale(self, x: Tensor) -> float:
        return 1 / (self.draws * max(x.shape[1] - 1, 1) ** 2)

    def _functions(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Some draws at a time: frequencies ``(k, m, P)``, over the bandwidth, and phases ``(k, m, 1)``."""
        m, batch, entries = x.shape
        some = chunk_size(m * max(batch, m, entries))
        for first in range(0, self.draws, some):
            count = min(some, self.draws - first)
            radius, angle, phase = (
                _uniform(self.seed, stream, first * size, count * size, x.device)
                for stream, size in enumerate((m * entries, m * entries, m))
            )
            normal = (-2 * radius.log()).sqrt() * torch.cos(2 * math.pi * angle)  # Box and Muller
            yield (
                (normal / self.bandwidth).to(x.dtype).view(count, m, entries),
                (2 * math.pi * phase).to(x.dtype).view(count, m, 1),
            )


def _project(x: Tensor, frequency: Tensor) -> Tensor:
    """``<w, x>`` for every draw, feature and sample: ``(k, m, B)``."""
    return (x @ frequency.permute(1, 2, 0)).permute(2, 0, 1)


def _spread(force: Tensor, frequency: Tensor) -> Tensor:
    """The adjoint of :func:`_project`: ``(k, m, B)`` to ``(m, B, P)``."""
    return force.permute(1, 2, 0) @ frequency.permute(1, 0, 2)


def _centre(waves: Tensor) -> Tensor:
    return waves - waves.mean(-1, keepdim=True)


def _uniform(seed: int, stream: int, first: int, count: int, device: torch.device) -> Tensor:
    """Numbers ``first`` to ``first + count`` of a stream of uniform ones in (0, 1), float64.

    A hash of the position, not a ``torch.Generator``: it gives the same functions on every device without a
    copy from the host, whatever the chunks, keeps no state, and can be compiled or captured in a CUDA graph.
    """
    key = _mix(_mix(seed & 0xFFFFFFFF) ^ (stream + 1))
    position = torch.arange(first, first + count, device=device) & 0xFFFFFFFF
    return (_mix(_mix(position) ^ key).double() + 0.5) / 2**32


def _mix(word: Word) -> Word:
    """A multiplicative hash of 32-bit words; its factor is so small that 64 bits hold each product."""
    for _ in range(2):
        word = ((word ^ (word >> 16)) * 0x045D9F3B) & 0xFFFFFFFF
    return word ^ (word >> 16)
