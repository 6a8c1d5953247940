"""A model of the ring of `roles.cuh`: the roles of one program in any order, with a clock for each
thread, which tells whether anything orders two accesses of one place.

A warp is two threads, lane 0 and one for the other lanes. Shuffles and votes order no memory, and
packets none either. Each function follows the one of its name in `roles.cuh`, barrier for barrier.
"""

import collections

from one_read_model import keep

# Fewer warps of a kind than in the kernel, where they do the same in their own columns.
SUM = GRAD = 2
Thread = collections.namedtuple("Thread", "role warp lane")
PATIENCE = 100_000  # steps of which none went on: the roles wait for each other


class Barrier:
    """An mbarrier: its phase ends after so many arrivals and all bytes of copies."""

    def __init__(self, count):
        self.count = self.missing = count
        self.copies = self.phase = 0
        self.gathered, self.released = Clock(), Clock()

    def end_phase_if_complete(self):
        if not self.missing and not self.copies:
            self.released, self.gathered = self.gathered, Clock()
            self.phase, self.missing = self.phase + 1, self.count


class Clock:
    """What a thread knows to be over. seen: of each thread, its last step; fenced: the same, for
    copies, which see what was written before a proxy fence."""

    def __init__(self, seen=(), fenced=()):
        self.seen, self.fenced = collections.Counter(seen), collections.Counter(fenced)

    def join(self, other):
        self.seen |= other.seen
        self.fenced |= other.fenced

    def copy(self):
        return Clock(self.seen, self.fenced)


class Ring:
    """One launch of a program.

    order: random.Random. ignored: items whose token is ignored. is_written: whether gradients are.
    has_entries: whether there is a top-K teacher, of which each thread has an entry. has_mixture:
    whether there is a second round. without: one step of one role that is left out, as "post:
    arrive ready"; `steps` gathers them.
    """

    def __init__(
        self,
        order,
        slots,
        n_items,
        turns,
        ignored=(),
        is_written=True,
        has_entries=False,
        has_mixture=False,
        without=None,
    ):
        self.order, self.slots, self.n_items, self.turns = order, slots, n_items, turns
        self.has_entries, self.has_mixture = has_entries, has_mixture
        self.ignored, self.is_written, self.without = ignored, is_written, without
        self.steps, self.clocks, self.accesses = set(), {}, collections.defaultdict(dict)
        self.items, self.meetings = [None] * slots, {}
        self.packets, self.packets_of_second_round = set(), set()
        arrivals = {
            "full": ["load"],
            "stat": ["sum"] * SUM,
            "known": ["post", "merge"],
            "mixed": ["mix"] * SUM,
            "ready": ["tell" if has_mixture else "post", "merge"],
            "done": ["grad"] * GRAD,
            "free": ["store"],
        }
        self.barriers = {
            name: [
                Barrier(sum(f"{role}: arrive {name}" != without for role in roles))
                for _ in range(slots)
            ]
            for name, roles in arrivals.items()
        }
        self.tasks = {}
        self.begin(Thread("load", 0, 0), self.load)
        self.begin(Thread("store", 0, 0), self.store)
        for role, number in turns.items():
            for me in range(number):
                for w in range({"sum": SUM, "mix": SUM, "grad": GRAD}.get(role, 1)):
                    for lane in range(2):
                        self.begin(Thread(role, (me, w), lane), getattr(self, role), me, w)

    def begin(self, thread, role, *others):
        self.clocks[thread] = Clock({thread: 1})
        self.tasks[thread] = role(thread, *others)

    def run(self):
        """Run until all roles have ended. Raise AssertionError for what nothing orders."""
        tasks, idle = self.tasks, 0
        slow = {task for task in tasks if self.order.random() < 0.2}
        while tasks:
            thread = self.order.choice(list(tasks))
            if thread in slow and self.order.random() < 0.95:
                continue
            try:
                idle = 0 if next(tasks[thread]) else idle + 1
            except StopIteration:
                del tasks[thread]
            assert idle < PATIENCE, f"roles wait for each other: {sorted(map(str, tasks))}"

    # -- What threads do ---------------------------------------------------------------------------

    def is_left_out(self, thread, step):
        step = f"{thread.role}: {step}"
        self.steps.add(step)
        return step == self.without

    def access(self, thread, place, writes):
        """Read or write a place. Copies are threads named "copy in" and "copy out"."""
        clock, is_copy = self.clocks[thread], thread.role.startswith("copy")
        for (other, wrote), when in self.accesses[place].items():
            if other != thread and (writes or wrote):
                is_over = clock.seen[other] >= when
                if is_copy and not other.role.startswith("copy"):
                    is_over = clock.fenced[other] >= when
                assert is_over, f"nothing orders {other}'s access of {place} and {thread}'s"
        self.accesses[place][thread, writes] = clock.seen[thread]

    def read(self, thread, *places):
        for place in places:
            self.access(thread, place, False)

    def write(self, thread, *places):
        for place in places:
            self.access(thread, place, True)

    def release(self, thread, barrier):
        barrier.gathered.join(self.clocks[thread])
        self.clocks[thread].seen[thread] += 1

    def arrive(self, thread, name, n, copies=0):
        if self.is_left_out(thread, f"arrive {name}"):
            return
        barrier = self.barriers[name][n % self.slots]
        self.release(thread, barrier)
        barrier.missing -= 1
        barrier.copies += copies
        assert barrier.missing >= 0, f"{thread} arrives at {name} once more than it takes"
        barrier.end_phase_if_complete()

    def wait(self, thread, name, n):
        """Wait for the phase of item `n`, of which a thread sees the parity alone."""
        if self.is_left_out(thread, f"wait {name}"):
            return
        barrier, lap = self.barriers[name][n % self.slots], n // self.slots
        while barrier.phase % 2 == lap % 2:
            yield False
        keep("I6", barrier.phase == lap + 1)
        self.clocks[thread].join(barrier.released)
        yield True

    def syncwarp(self, thread, n, why):
        if self.is_left_out(thread, f"syncwarp, {why}"):
            return
        met = self.meetings.setdefault((thread.role, thread.warp, n, why), {})
        met[thread.lane] = self.clocks[thread].copy()
        self.clocks[thread].seen[thread] += 1
        while len(met) < 2:
            yield False
        for clock in met.values():
            self.clocks[thread].join(clock)
        yield True

    def fence_proxy(self, thread):
        if not self.is_left_out(thread, "fence"):
            self.clocks[thread].fenced |= self.clocks[thread].seen
            self.clocks[thread].seen[thread] += 1

    def copy(self, thread, name, n, act):
        """Begin a copy, which accesses memory later."""
        copy = Thread(name, n, 0)
        self.begin(copy, act, n)
        self.clocks[copy].join(self.clocks[thread])
        self.clocks[thread].seen[thread] += 1
        return copy

    def columns(self, n):
        """Of each leaf all columns but those of entries."""
        return [("columns", n % self.slots, w) for w in range(SUM)]

    def entries(self, n, w):
        """Of a leaf the columns of each lane's entries."""
        return [("entry", n % self.slots, w, lane) for lane in range(2)]

    def all_columns(self, n):
        return self.columns(n) + [x for w in range(SUM) for x in self.entries(n, w)]

    def nodes(self, n):
        return [("node", n % self.slots, w) for w in range(SUM)]

    def item(self, thread, n):
        """Read which item lies in a slot: None is an end."""
        self.read(thread, ("item", n % self.slots))
        found = self.items[n % self.slots]
        keep("I3", found == (n if n < self.n_items else None))
        return found

    # -- Roles -------------------------------------------------------------------------------------

    def load(self, thread):
        for n in range(self.n_items + self.turns["merge"]):
            yield from self.wait(thread, "free", n - self.slots)
            self.write(thread, ("item", n % self.slots))
            self.items[n % self.slots] = n if n < self.n_items else None
            if n >= self.n_items or n in self.ignored:
                self.arrive(thread, "full", n)
                continue
            self.arrive(thread, "full", n, copies=1)
            self.copy(thread, "copy in", n, self.copy_in)

    def copy_in(self, thread, n):
        yield True
        self.write(thread, *self.all_columns(n))
        yield True
        barrier = self.barriers["full"][n % self.slots]
        self.release(thread, barrier)
        barrier.copies -= 1
        barrier.end_phase_if_complete()

    def sum(self, thread, me, w):
        for n in range(me, self.n_items + self.turns["merge"], self.turns["sum"]):
            yield from self.wait(thread, "full", n)
            item = self.item(thread, n)
            if item is not None and n not in self.ignored:
                own, label = self.columns(n)[w], ("label", n % self.slots)
                entries = self.entries(n, w)
                if self.has_entries:
                    self.read(thread, entries[thread.lane])
                    self.write(thread, entries[thread.lane])
                if thread.lane == 0 and w == n % SUM:
                    self.read(thread, own)
                    self.write(thread, own, label)
                yield from self.syncwarp(thread, n, "other lanes read these columns")
                self.read(thread, own, *entries)
                if w == n % SUM:
                    self.read(thread, label)
                if self.has_entries:
                    yield from self.syncwarp(thread, n, "other lanes have read the leaf")
                    if thread.lane == 0:
                        self.write(thread, *entries)
            yield from self.syncwarp(thread, n, "all lanes have read their columns")
            if thread.lane == 0:
                if item is not None:
                    self.write(thread, self.nodes(n)[w])
                if n:
                    yield from self.wait(thread, "stat", n - 1)
                self.arrive(thread, "stat", n)

    def post(self, thread, me, w):
        n = me
        while True:
            yield from self.wait(thread, "stat", n)
            end = "known" if self.has_mixture else "ready"
            if self.item(thread, n) is None:
                if thread.lane == 0:
                    self.arrive(thread, end, n)
                return
            self.read(thread, *self.nodes(n))
            if n not in self.ignored:
                yield from self.wait(thread, "full", n)
                self.read(thread, *self.all_columns(n), ("label", n % self.slots))
            self.packets.add(n)
            yield True
            yield from self.syncwarp(thread, n, "all lanes have read the slot")
            if thread.lane == 0:
                self.arrive(thread, end, n)
            n += self.turns["post"]

    def merge(self, thread, me, w):
        n = me
        while True:
            yield from self.wait(thread, "full", n)
            if self.item(thread, n) is None:
                if thread.lane == 0:
                    if self.has_mixture:
                        self.arrive(thread, "known", n)
                    self.arrive(thread, "ready", n)
                return
            while n not in self.packets:
                yield False
            if not self.has_mixture:
                yield from self.wait(thread, "stat", n)
            if self.has_mixture:
                if thread.lane == 0:
                    self.write(thread, ("factor", n % self.slots))
                    self.arrive(thread, "known", n)
                while n not in self.packets_of_second_round:
                    yield False
                yield from self.wait(thread, "mixed", n)
            if n not in self.ignored:
                self.read(thread, ("label", n % self.slots))
            yield from self.syncwarp(thread, n, "all lanes have read the slot")
            if thread.lane == 0:
                self.write(thread, ("factor", n % self.slots))
                self.arrive(thread, "ready", n)
            n += self.turns["merge"]

    def mix(self, thread, me, w):
        n = 0
        while True:
            yield from self.wait(thread, "known", n)
            item = self.item(thread, n)
            if item is not None and n not in self.ignored:
                own = self.columns(n)[w], *self.entries(n, w)
                self.read(thread, ("factor", n % self.slots), *own)
                if thread.lane == 0 and w == n % SUM:
                    self.read(thread, ("label", n % self.slots))
            yield from self.syncwarp(thread, n, "all lanes have read the slot")
            if thread.lane == 0:
                if item is not None:
                    self.write(thread, self.nodes(n)[w])
                self.arrive(thread, "mixed", n)
            if item is None:
                return
            n += 1

    def tell(self, thread, me, w):
        n = 0
        while True:
            yield from self.wait(thread, "mixed", n)
            if self.item(thread, n) is None:
                if thread.lane == 0:
                    self.arrive(thread, "ready", n)
                return
            self.read(thread, *self.nodes(n))
            self.packets_of_second_round.add(n)
            yield True
            yield from self.syncwarp(thread, n, "all lanes have read the slot")
            if thread.lane == 0:
                self.arrive(thread, "ready", n)
            n += 1

    def grad(self, thread, me, w):
        n = 0
        while True:
            if self.has_entries:
                yield from self.wait(thread, "full", n)
                self.item(thread, n)
            yield from self.wait(thread, "ready", n)
            if self.item(thread, n) is None:
                if thread.lane == 0:
                    self.arrive(thread, "done", n)
                return
            if self.is_written:
                own, entries = self.columns(n)[(w + 1) % SUM], self.entries(n, (w + 1) % SUM)
                has_entries = self.has_entries and n not in self.ignored
                if has_entries:
                    self.read(thread, entries[thread.lane])
                    yield from self.syncwarp(thread, n, "before other lanes write there")
                self.read(thread, ("factor", n % self.slots), own)
                self.write(thread, entries[1 - thread.lane])
                yield from self.syncwarp(thread, n, "other lanes wrote these columns")
                if has_entries:
                    self.write(thread, entries[thread.lane])
                if thread.lane == 0:
                    self.write(thread, own)
            self.fence_proxy(thread)
            yield from self.syncwarp(thread, n, "of all lanes")
            if thread.lane == 0:
                self.arrive(thread, "done", n)
            n += 1

    def store(self, thread):
        n = 0
        while True:
            yield from self.wait(thread, "done", n)
            if self.item(thread, n) is None:
                return
            if self.is_written:
                copy = self.copy(thread, "copy out", n, self.copy_out)
                while copy in self.tasks and not self.is_left_out(thread, "wait for the copy"):
                    yield False
                self.clocks[thread].join(self.clocks[copy])
            self.arrive(thread, "free", n)
            n += 1

    def copy_out(self, thread, n):
        yield True
        self.read(thread, *self.all_columns(n))
        yield True
