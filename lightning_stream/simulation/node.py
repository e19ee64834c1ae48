"""One node on a simulated clock: its ranks train, their workers make batches, and threads fetch shards."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import partial

from lightning_stream.reading.fetches import hurried_threads
from lightning_stream.reading.look_ahead import furthest_ahead, spare_requests
from lightning_stream.reading.shard_heads import MOST_OF_SHARD
from lightning_stream.simulation.disk import Disk
from lightning_stream.simulation.needs import Need, Shards, Training
from lightning_stream.simulation.ranges import RangeReads
from lightning_stream.simulation.settings import Machine
from lightning_stream.simulation.shared import Call, Clock, Shared
from lightning_stream.stores.retry import RetryPolicy, parts_of

_MB = 1e6
_PIECES = 32  # of a shard whose beginning is read while the rest arrives
_RANGES = -1  # in the place of a shard: the samples that come by ranges
INDEX_REQUESTS = 2  # one of them asks for versions
_POLICY = RetryPolicy()


class Worker:
    """A process that makes every n-th batch of a rank."""

    def __init__(self, needs: Sequence[Need], num_threads: int, num_ahead: int, ranges: RangeReads) -> None:
        self.needs, self.ranges = needs, ranges
        self.credits = num_ahead  # batches that it may make before another one is taken
        self.has_started = self.is_busy = False
        self.num_announced = self.num_made = 0
        self.queue: deque[int] = deque()  # shards that wait for a thread
        self.num_threads = self.idle_threads = num_threads
        self.num_wanted = 0  # shards that it is to fetch, or fetches
        self.num_unfinished = 0  # these, and those that other processes fetch
        self.here: set[int] = set()
        self.coming: set[int] = set()
        self.missing: set[int] = set()  # what the batch in progress waits for
        self.awaited: Counter[int] = Counter()  # announced batches by shard, under a cache limit
        self.has_client = False
        self.on_client: list[Call] = []  # what waits for the client of the store

    @property
    def could_fetch_more(self) -> bool:
        """Whether shards are waited for while threads are idle."""
        return self.num_unfinished > 0 and self.num_wanted < self.num_threads


class Rank:
    """A training process."""

    def __init__(self, needs: Sequence[Need], workers: list[Worker]) -> None:
        self.needs, self.workers = needs, workers
        self.num_taken = 0
        self.is_waiting = False

    @property
    def next_worker(self) -> Worker:
        """The worker of the batch that the rank takes next."""
        return self.workers[self.num_taken % len(self.workers)]

    @property
    def has_next(self) -> bool:
        """Whether that batch is made."""
        return self.next_worker.num_made > self.num_taken // len(self.workers)


class NodeModel:
    """The ranks of one node that train some steps from an empty cache on.

    Args:
        needs: The micro-batches of each rank.
        training, shards, machine: The run, its data, and what is assumed of the nodes.

    Attributes:
        first_batch_s: When the first batches were taken on all ranks.
        step_ends: When each step ended.
        made: Micro-batches that had been made by then.
        fetched: Bytes that had been fetched by then.
        num_fetched, num_requests, num_bytes, num_raw_bytes: The shards that were fetched, with the requests and bytes.
    """

    def __init__(
        self,
        needs: Sequence[Sequence[Need]],
        training: Training,
        shards: Shards,
        machine: Machine,
    ) -> None:
        link, self.work, self.node = machine.link, machine.work, machine.node
        self.training, self.shards, self.latency_s = training, shards, link.latency_s
        self.link = Shared(link.connection_bytes_per_s, link.of_node(training.world.num_nodes))
        self.cores = Shared(1.0, self.node.num_cores)
        self.clock = Clock(self.link, self.cores)
        self.disk = Disk(shards, self.node.cache_limit, needs)
        self.ranks = [self._rank(own) for own in needs]
        self.num_steps = 1 + max(own[-1].step for own in needs)
        self.num_done = self.num_first = 0  # ranks that have finished the step; that have a batch
        self.first_batch_s = 0.0
        self.step_ends: list[float] = []
        self.made: list[int] = []
        self.fetched: list[int] = []
        self.num_fetched = self.num_requests = self.num_bytes = self.num_made = 0
        self.num_raw_bytes = 0
        self.early = {shard for own in needs for need in own for shard in need.beginnings}
        self.parts_here: dict[int, float] = {}  # of these shards, while they are being fetched

    def _rank(self, needs: Sequence[Need]) -> Rank:
        count, node = max(1, self.node.num_workers), self.node
        first = node.prefetch_factor if node.num_workers else 0
        spare = spare_requests(len(self.shards.num_samples), self.training.world.num_replicas * count)
        ranges = [RangeReads(self.shards, node.start_by_range, spare) for _ in range(count)]
        workers = [Worker(needs[k::count], node.fetch_threads, first, ranges[k]) for k in range(count)]
        return Rank(needs, workers)

    @property
    def workers(self) -> list[Worker]:
        """Those of all ranks."""
        return [worker for rank in self.ranks for worker in rank.workers]

    def run(self, num_steps: int | None = None) -> None:
        """Train so many steps, or all; fewer were done afterwards where the loader would have stopped."""
        most, work = self.num_steps if num_steps is None else num_steps, self.work
        index_s = INDEX_REQUESTS * self.latency_s + self.shards.index_bytes / self.link.fastest
        begin_s = work.start_s + work.client_s + index_s
        for rank in self.ranks:
            self.clock.after(begin_s, partial(self._ask, rank))
            for number, worker in enumerate(rank.workers, 1):
                worker.has_client = not self.node.num_workers  # the process has read the index with it
                starts_s = begin_s + number * work.worker_s * bool(self.node.num_workers)
                self.clock.after(starts_s, partial(self._start, worker))
        self.clock.run(lambda: len(self.step_ends) >= most)

    def _start(self, worker: Worker) -> None:
        worker.has_started = True
        self._begin(worker)

    # -- training

    def _ask(self, rank: Rank) -> None:
        if rank.num_taken == len(rank.needs):
            return
        rank.is_waiting = True
        if not self.node.num_workers:
            rank.next_worker.credits += 1
            self._begin(rank.next_worker)
        self._take(rank)

    def _take(self, rank: Rank) -> None:
        if rank.is_waiting and rank.has_next:
            rank.is_waiting = False
            self.clock.after(self.work.send_s * bool(self.node.num_workers), partial(self._taken, rank))

    def _taken(self, rank: Rank) -> None:
        if not rank.num_taken:
            self.num_first += 1
            self.first_batch_s = self.clock.now
        need, worker = rank.needs[rank.num_taken], rank.next_worker
        rank.num_taken += 1
        if self.node.num_workers:
            worker.credits += 1
            self._begin(worker)
        self.clock.after(need.step_share * self.work.step_s, partial(self._trained, rank, need))

    def _trained(self, rank: Rank, need: Need) -> None:
        if not need.completes_step:
            self._ask(rank)
            return
        self.num_done += 1
        if self.num_done == len(self.ranks):  # all ranks exchange their gradients
            self.num_done = 0
            self.step_ends.append(self.clock.now)
            self.made.append(self.num_made)
            self.fetched.append(self.num_bytes)
            for one in self.ranks:
                self._ask(one)

    # -- making batches

    def _begin(self, worker: Worker) -> None:
        """Begin the worker's next batch, if it may; the look-ahead comes first."""
        if not worker.has_started or worker.is_busy or not worker.credits or worker.num_made == len(worker.needs):
            return
        worker.credits -= 1
        worker.is_busy = True
        if worker.num_made:
            self._take_back(worker, worker.needs[worker.num_made - 1])
        while worker.num_announced < len(worker.needs):
            is_limited = self.disk.limit_bytes is not None or not worker.could_fetch_more
            allowed = furthest_ahead(self.node.predownload, self.training.device_batch_size, is_limited=is_limited)
            if worker.num_announced - worker.num_made > allowed:
                break
            self._announce(worker, worker.needs[worker.num_announced])
            worker.num_announced += 1
        need = worker.needs[worker.num_made]
        worker.missing = {one for one in need.shards if one not in worker.here and not self._has_come(worker, one)}
        if not worker.missing:
            self._read(worker)
            return
        num_threads = hurried_threads(worker.num_threads, len(worker.missing))
        worker.idle_threads += num_threads - worker.num_threads
        worker.num_threads = num_threads
        self._fetch_next(worker)
        range_s = self._by_range(worker, need)
        worker.missing.add(_RANGES)
        self.clock.after(range_s, partial(self._got, worker, _RANGES))

    def _by_range(self, worker: Worker, need: Need) -> float:
        """Read samples by ranges where that costs less than their shards; return the seconds."""
        chosen = worker.ranges.chosen({shard: need.shards[shard] for shard in worker.missing}, need.beginnings)
        worker.missing.difference_update(chosen)
        num_requests, rounds, largest_bytes = worker.ranges.read({shard: need.shards[shard] for shard in chosen})
        seconds = rounds * self.latency_s + largest_bytes / self.link.fastest
        return seconds + num_requests * self.work.shard_s  # one after another, by Python's lock

    def _has_come(self, worker: Worker, shard: int) -> bool:
        """Whether as much of a shard that is being fetched has come as the worker's next batch needs."""
        part = worker.needs[worker.num_made].beginnings.get(shard, 1.0)
        return part <= self.parts_here.get(shard, 0.0) and worker.ranges.come_early(shard, part)

    def _got(self, worker: Worker, what: int) -> None:
        """Make the batch in progress once the last of what it waits for is here."""
        if what in worker.missing:
            worker.missing.discard(what)
            if not worker.missing:
                self._read(worker)

    def _read(self, worker: Worker) -> None:
        seconds = worker.needs[worker.num_made].num_samples * self.work.sample_s
        self.cores.add(self.clock.now, seconds, partial(self._made, worker))

    def _made(self, worker: Worker) -> None:
        worker.is_busy = False
        worker.num_made += 1
        self.num_made += 1
        for rank in self.ranks:
            if rank.is_waiting and rank.next_worker is worker:
                self._take(rank)
        self._begin(worker)

    # -- fetching

    def _announce(self, worker: Worker, need: Need) -> None:
        if self.disk.limit_bytes is not None:
            worker.awaited.update(need.shards.keys())
        new = [shard for shard in need.shards if shard not in worker.here and shard not in worker.coming]
        worker.coming.update(new)
        worker.queue.extend(new)
        worker.num_wanted += len(new)
        worker.num_unfinished += len(new)
        self._fetch_next(worker)

    def _take_back(self, worker: Worker, need: Need) -> None:
        """Under a limit, close the shards that no announced batch needs; one that has waited for space gets it."""
        if self.disk.limit_bytes is None:
            return
        for shard in need.shards:
            worker.awaited[shard] -= 1
            if not worker.awaited[shard] and shard in worker.here:
                worker.here.discard(shard)
                self.disk.release(shard)
        for call in self.disk.waiting():
            call()

    def _fetch_next(self, worker: Worker) -> None:
        """Give shards to idle threads."""
        while worker.queue and worker.idle_threads:
            shard = worker.queue.popleft()
            if self.disk.has(shard):
                self.clock.after(0.0, partial(self._found, worker, partial(self._arrived, worker, shard)))
            elif (others := self.disk.fetching.get(shard)) is not None:
                others.append(partial(self._arrived, worker, shard))
                self.clock.after(0.0, partial(self._found, worker))
            else:
                worker.idle_threads -= 1
                self.disk.fetching[shard] = []
                # With fewer shards wanted than threads, the connections of the idle ones help.
                connections = max(1, self.node.fetch_threads // max(1, worker.num_wanted))
                self._make_space(worker, shard, connections)

    def _found(self, worker: Worker, then: Call | None = None) -> None:
        """Let a thread find a shard that is here or comes: when it runs, the worker has announced its next batches."""
        worker.num_wanted -= 1
        if then is not None:
            then()

    def _make_space(self, worker: Worker, shard: int, connections: int) -> None:
        if not self.disk.make_space(shard, worker.needs[worker.num_made].step):
            self.disk.wait(partial(self._make_space, worker, shard, connections))
            return
        parts = [end - begin for begin, end in parts_of(int(self.shards.stored_bytes[shard]), connections, _POLICY)]
        self.num_fetched += 1
        self.num_requests += max(1, len(parts))
        worker.on_client.append(partial(self._fetch, worker, shard, parts or [0]))
        if worker.has_client:
            self._has_client(worker)
        elif len(worker.on_client) == 1:
            self.cores.add(self.clock.now, self.work.client_s, partial(self._has_client, worker))

    def _has_client(self, worker: Worker) -> None:
        worker.has_client = True
        calls, worker.on_client = worker.on_client, []
        for call in calls:
            call()

    def _fetch(self, worker: Worker, shard: int, parts: list[int]) -> None:
        """Get the parts of a shard, some at once, and unpack it."""
        later, running = deque(parts[_POLICY.parts_at_once :]), len(parts)

        def got_part() -> None:
            nonlocal running
            running -= 1
            if later:
                self._get(later.popleft(), got_part)
            elif not running:
                seconds = int(self.shards.raw_bytes[shard]) / _MB * self.work.unpack_s_per_mb + self.work.shard_s
                self.cores.add(self.clock.now, seconds, partial(self._fetched, worker, shard, sum(parts)))

        if len(parts) == 1 and shard in self.early:
            self._get_early(shard, parts[0], got_part)
            return
        for part in parts[: _POLICY.parts_at_once]:
            self._get(part, got_part)

    def _get_early(self, shard: int, num_bytes: int, then: Call) -> None:
        """Get a shard in pieces, one after another, for batches that need its beginning."""
        pieces = deque([1 / _PIECES] * int(_PIECES * MOST_OF_SHARD) + [1 - MOST_OF_SHARD])
        self.parts_here[shard] = 0.0

        def got_piece(piece: float) -> None:
            self.parts_here[shard] += piece
            if not pieces:
                del self.parts_here[shard]
                then()
                return
            self.link.add(self.clock.now, num_bytes * pieces[0], partial(got_piece, pieces.popleft()))
            for worker in self.workers:
                if shard in worker.missing and self._has_come(worker, shard):
                    self._got(worker, shard)

        self.clock.after(self.latency_s, partial(got_piece, 0.0))

    def _get(self, num_bytes: int, then: Call) -> None:
        self.clock.after(self.latency_s, lambda: self.link.add(self.clock.now, num_bytes, then))

    def _fetched(self, worker: Worker, shard: int, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.num_raw_bytes += int(self.shards.raw_bytes[shard])
        worker.num_wanted -= 1
        worker.idle_threads += 1
        others = self.disk.fetching.pop(shard)
        self.disk.publish(shard)
        self._arrived(worker, shard)
        for call in others:
            call()
        self._fetch_next(worker)

    def _arrived(self, worker: Worker, shard: int) -> None:
        worker.num_unfinished -= 1
        worker.coming.discard(shard)
        if self.disk.limit_bytes is not None and not worker.awaited[shard]:
            return  # nobody needs it any more
        worker.here.add(shard)
        self.disk.hold(shard)
        self._got(worker, shard)
