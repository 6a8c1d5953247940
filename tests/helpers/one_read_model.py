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
    peers write, of the first round and of the second."""

    def __init__(self, half):
        self.launches, self.claimed, self.done, self.failed = 0, 0, 0, False
        self.half, self.results = half, {}
        self.packets = [None] * (2 * half), [None] * (2 * half)


def program(ranks, me, n_rows, pieces, slots, n_programs, value, rounds=1):
    """One program of a launch as a coroutine that yields whether it could go on; value(rank, row,
    piece): a packet. In a second round a packet is what the first one's of the row add up to."""
    own, n_ranks = ranks[me], len(ranks)
    tag, n_packets = own.launches + 1, pieces * n_ranks
    first = tag % 2 * own.half
    ring, known = [], set()

    def send(number, item, packet):
        place = first + item.row * n_packets + me * pieces + item.piece
        for rank in ranks:
            # whoever gave up waiting may overwrite what a peer has not read
            keep("I8", own.failed or rank.launches >= tag - 2)
            rank.packets[number][place] = tag, packet
            yield True

    def total_of(number, item):
        """What all packets of a row add up to, None as long as one is missing."""
        found = own.packets[number][first + item.row * n_packets :][:n_packets]
        if own.failed:
            return float("nan")
        if all(packet is not None and packet[0] == tag for packet in found):
            return sum(packet[1] for packet in found)
        return None

    while True:
        # load, sum, post
        if len(ring) < slots and own.claimed is not None and own.claimed < n_rows * pieces:
            row, piece = divmod(own.claimed, pieces)
            keep("I2", not ring or ring[-1] < Piece(row, piece))
            own.claimed += 1
            yield True  # a peer's program may come between any two of these steps
            yield from send(0, Piece(row, piece), value(me, row, piece))
            ring.append(Piece(row, piece))
        elif not ring:
            break
        for item in [item for item in ring if rounds > 1 and item not in known]:  # mix, tell
            total = total_of(0, item)
            if total is None:
                yield False
                break  # items of a program have their turns
            known.add(item)
            yield from send(1, item, total)
        for item in list(ring):  # merge, grad
            total = total_of(rounds - 1, item)
            if total is None:
                yield False
            else:
                keep("I15", own.failed == math.isnan(total))
                own.results[tag, item.row, item.piece] = total
                ring.remove(item)
                yield True
    keep("I1", own.launches + 1 == tag)
    own.done += 1
    if own.done == n_programs:  # the last program prepares the next launch
        keep("I14", sum(key[0] == tag for key in own.results) == n_rows * pieces)
        own.done, own.claimed, own.launches = 0, 0, tag


def run(
    ranks,
    launches,
    n_programs,
    slots,
    value,
    order,
    resident=None,
    absent=(),
    patience=10_000,
    rounds=1,
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
                given = ranks, me, n_rows, pieces, slots, n_programs, value, rounds
                active[me].append(program(*given))
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
