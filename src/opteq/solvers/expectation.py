"""How long a solve is going to take, by those before it."""

from __future__ import annotations

from collections import deque

# As often as that in a row something else has to be seen before it is expected; twice as often after every change, so
# that plans are not made over and over for batches that keep changing.
_PATIENCE, _MOST_PATIENCE = 3, 48


class Expectation:
    """A length that is expected until others have been seen a few times in a row.

    ``length`` is None until the first one was seen.
    """

    def __init__(self) -> None:
        self.length: int | None = None
        self._patience = _PATIENCE
        self._others: deque[int] = deque()

    def saw(self, length: int) -> None:
        """Take notice of a solve."""
        if self.length is None:
            self.length = length
        elif length == self.length:
            self._others.clear()
        else:
            self._others.append(length)
            if len(self._others) >= self._patience:
                # The middle one: a solve that is planned too short goes on by itself, one too long is never shorter.
                self.length = sorted(self._others)[(len(self._others) - 1) // 2]
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
                self._others.clear()
