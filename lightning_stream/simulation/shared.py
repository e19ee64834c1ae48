"""A simulated clock, and what several jobs share on it: a link, or the cores of a processor."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Call = Callable[[], None]


class Shared:
    """A capacity that jobs share equally, each at most at a rate of its own."""

    def __init__(self, each: float, total: float | None) -> None:
        self._each, self.capacity = each, math.inf if total is None else total
        self._jobs: list[tuple[float, int, Call]] = []  # by the share at which they end
        self._numbers = count()
        self._share = self._since = 0.0  # what each job has got since the beginning, and when that was computed

    def _rate(self) -> float:
        return min(self._each, self.capacity / len(self._jobs))

    def _advance(self, now: float) -> None:
        if self._jobs:
            self._share += (now - self._since) * self._rate()
        self._since = now

    @property
    def fastest(self) -> float:
        """The rate of a job that is alone."""
        return min(self._each, self.capacity)

    def add(self, now: float, amount: float, then: Call) -> None:
        """Begin a job."""
        self._advance(now)
        heappush(self._jobs, (self._share + amount, next(self._numbers), then))

    def next_end(self) -> float:
        """When the next job ends, if none is added before."""
        if not self._jobs:
            return math.inf
        return self._since + max(0.0, self._jobs[0][0] - self._share) / self._rate()

    def end_next(self, now: float) -> Call:
        """Remove the job that ends now."""
        self._advance(now)
        return heappop(self._jobs)[2]


class Clock:
    """Runs calls at their times, and jobs of what is shared until they end."""

    def __init__(self, *shared: Shared) -> None:
        self.now = 0.0
        self._shared, self._calls, self._numbers = shared, list[tuple[float, int, Call]](), count()

    def after(self, seconds: float, call: Call) -> None:
        """Run a call later; calls of one moment run in the order in which they were given."""
        heappush(self._calls, (self.now + seconds, next(self._numbers), call))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run until it is over, or until nothing is left to happen."""
        while not is_over():
            at, jobs = min(((one.next_end(), one) for one in self._shared), key=lambda pair: pair[0])
            if self._calls and self._calls[0][0] <= at:
                self.now, _, call = heappop(self._calls)
            elif at < math.inf:
                self.now, call = at, jobs.end_next(at)
            else:
                return
            call()
