"""A model of the protocol of `one_read.cu`: roles as coroutines over what programs and ranks share,
in any order. It asserts invariants by the numbers that they have in `roles.cuh`."""

import math
from collections import namedtuple

Piece = namedtuple("Piece", "row piece")


def keep(invariant, holds):
    """Raise AssertionError if an invariant does not hold."""
    assert holds, f"{invariant} of roles.cuh does not hold"


class Rank:
    """What the programs of one rank share: numbers of launches, claims, and the packets that its
    peers write."""

    def __init__(self, half):
        self.launches, self.claimed, self.done, self.failed = 0, 0, 0, False
        self.half, self.packets, self.results = half, [None] * (2 * half), {}


def program(ranks, me, n_rows, pieces, slots, n_programs, value):
    """One program of a launch as a coroutine that yields whether it could go on; value(rank, row,
    piece): a packet."""
    own, n_ranks = ranks[me], len(ranks)
    tag, n_packets = own.launches + 1, pieces * n_ranks
    first = tag % 2 * own.half
    ring = []
    while True:
        # load, sum, post
        if len(ring) < slots and own.claimed is not None and own.claimed < n_rows * pieces:
            row, piece = divmod(own.claimed, pieces)
            keep("I2", not ring or ring[-1] < Piece(row, piece))
            own.claimed += 1
            yield True  # a peer's program may come between any two of these steps
            place = first + row * n_packets + me * pieces + piece
            for rank in ranks:
                # whoever gave up waiting may overwrite what a peer has not read
                keep("I8", own.failed or rank.launches >= tag - 2)
                rank.packets[place] = tag, value(me, row, piece)
                yield True
            ring.append(Piece(row, piece))
        elif not ring:
            break
        for item in list(ring):  # merge, grad
            found = own.packets[first + item.row * n_packets :][:n_packets]
            if own.failed or all(packet is not None and packet[0] == tag for packet in found):
                total = float("nan") if own.failed else sum(packet[1] for packet in found)
                keep("I15", own.failed == math.isnan(total))
                own.results[tag, item.row, item.piece] = total
                ring.remove(item)
                yield True
            else:
                yield False
    keep("I1", own.launches + 1 == tag)
    own.done += 1
    if own.done == n_programs:  # the last program prepares the next launch
        keep("I14", sum(key[0] == tag for key in own.results) == n_rows * pieces)
        own.done, own.claimed, own.launches = 0, 0, tag


def run(
    ranks, launches, n_programs, slots, value, order, resident=None, absent=(), patience=10_000
):
    """Run launches (n_rows, pieces) of all ranks, those of one rank one after the other; order:
    random.Random.

    resident: programs of a rank that run at once, the others begin when one has ended. absent:
    ranks that never launch; the others give up after `patience` steps of which none went on, as
    after a timeout.
    """
    waiting = {me: [] if me in absent else list(launches) for me in range(len(ranks))}
    active = {me: [] for me in waiting}
    begun = dict.fromkeys(waiting, 0)
    stuck = 0
    while any(waiting.values()) or any(active.values()):
        for me in waiting:
            if not active[me] and begun[me] == 0 and waiting[me]:
                begun[me] = n_programs
            while begun[me] and len(active[me]) < (resident or n_programs):
                n_rows, pieces = waiting[me][0]
                active[me].append(program(ranks, me, n_rows, pieces, slots, n_programs, value))
                begun[me] -= 1
        me = order.choice([me for me in active if active[me]])
        step = order.choice(active[me])
        try:
            stuck = 0 if next(step) else stuck + 1
        except StopIteration:
            active[me].remove(step)
            if not active[me] and not begun[me]:
                waiting[me].pop(0)
        if stuck > patience:
            for rank in ranks:
                rank.failed = True
            stuck = 0


def take_turns(order, slots, teams, post, merge, n_items, waits_for_the_team_before=True):
    """Sum, post and merge warps take a program's items in turns. Raise AssertionError where one
    takes a barrier's phase for another, so that an invariant does not hold.

    Items are there in any order, and some, as those of ignored rows, are summed at once; order:
    random.Random
    """
    # barriers: phases that have ended, of which one sees the parity
    full, stat, free = ([0] * slots for _ in range(3))
    held = [None] * slots
    summed_items, posted_items, merged_items = [], set(), set()

    def load():
        for n in range(n_items):
            yield from until(free, n, of_last_lap=True)
            keep("I11", n < slots or n - slots in merged_items)
            held[n % slots] = n
            tasks.append(copy(n))
            yield

    def copy(n):
        for _ in range(order.choice([0, 5, 50])):
            yield
        full[n % slots] += 1

    def until(barriers, n, of_last_lap=False):
        while barriers[n % slots] % 2 == (n // slots + of_last_lap) % 2:
            yield

    def role(me, number, barriers, act):
        for n in range(me, n_items, number):
            yield from until(barriers, n)
            keep("I3", held[n % slots] == n)
            yield from act(n)

    def summed(n):
        for _ in range(order.choice([0, 10, 100])):
            yield
        if waits_for_the_team_before and n:
            yield from until(stat, n - 1)
            keep("I6", summed_items[-1] == n - 1)
        summed_items.append(n)
        stat[n % slots] += 1

    def posted(n):
        keep("I5", n in summed_items)
        yield
        keep("I7", held[n % slots] == n)
        posted_items.add(n)

    def merged(n):
        while n not in posted_items:
            yield
        yield from until(stat, n)
        keep("I9", n in summed_items)
        merged_items.add(n)
        free[n % slots] += 1

    roles = (teams, full, summed), (post, stat, posted), (merge, full, merged)
    tasks = [
        load(),
        *(role(me, *others) for others in roles for me in range(others[0])),
    ]
    while tasks:
        task = order.choice(tasks)
        for _ in range(order.randrange(1, 20)):
            if next(task, tasks) is tasks:
                tasks.remove(task)
                break
