"""What the exchange of a cross-entropy costs at 8 to 512 ranks of one vocabulary: the model of
docs/scale.md.

    python scripts/bench/scale.py                      # the table of docs/scale.md
    # other constants: GB/s and microseconds of a step
    python scripts/bench/scale.py --tokens 2048 --slow-link 100 3

Volumes are exact (a test counts them in simulated groups), times are the model's: a collective
takes a number of steps, each with the latency of its slowest link, and moves its bytes at that
link's rate. No GPU is used.
"""

import argparse
import math
from typing import NamedTuple

NODE = 8  # ranks that NVLink joins
RANKS = 8, 16, 32, 64, 128, 256, 512
ROWS = 4  # of fp32 in a cross-entropy's packet
LANES = 3  # of float64 of the transport "sum", after a maximum in fp32
# bytes per microsecond at which a merge reads packets: an H200's, as the merge kernel reaches it
MEMORY = 3.2e6


class Link(NamedTuple):
    rate: float  # GB/s
    step: float  # microseconds

    def time(self, steps: float, size: float) -> float:
        """Microseconds of a collective of some steps that moves some bytes through each rank."""
        return steps * self.step + size / (self.rate * 1e3)


# NVLink: from all-gathers of 0.4 and 1.6 MB on four H200, 12 and 18 us in CUDA graphs
FAST = Link(147.0, 3.3)
SLOW = Link(50.0, 5.0)  # InfiniBand NDR, a port per GPU: assumed


def chunks_of(ranks: int) -> int:
    """Chunks of a rank: the vocabulary has 8 of them, or one per rank."""
    return NODE // ranks if NODE % ranks == 0 else 1


def gathered_bytes(ranks: int, tokens: int) -> int:
    """The packets of all ranks, which every rank receives."""
    return ranks * chunks_of(ranks) * ROWS * 4 * tokens


def lane_bytes(tokens: int) -> int:
    """The maximum and the lanes of a rank, whatever the number of ranks."""
    return (4 + LANES * 8) * tokens


def gather_time(ranks: int, tokens: int, slow: Link) -> float:
    """A ring all-gather of packets."""
    size = gathered_bytes(ranks, tokens) * (ranks - 1) / ranks
    return (FAST if ranks <= NODE else slow).time(ranks - 1, size)


def sum_time(ranks: int, tokens: int, slow: Link) -> float:
    """Two all-reduces: within a node, then a tree over nodes, then within the node again."""
    nodes = max(ranks // NODE, 1)
    inside = FAST.time(4 * (min(ranks, NODE) - 1), 2 * lane_bytes(tokens))
    return inside + (slow.time(4 * math.log2(nodes), 2 * lane_bytes(tokens)) if nodes > 1 else 0.0)


def nodes_first_time(ranks: int, tokens: int, slow: Link) -> float:
    """An all-gather within the node, a merge to one packet, and a ring all-gather over nodes; not
    implemented."""
    nodes = max(ranks // NODE, 1)
    inside = gather_time(min(ranks, NODE), tokens, slow)
    folded = ROWS * 4 * tokens
    return (
        inside
        + merge_time(NODE, tokens)
        + (slow.time(nodes - 1, (nodes - 1) * folded) if nodes > 1 else 0.0)
    )


def merge_time(packets: int, tokens: int) -> float:
    """A merge of packets, each read twice: for the maximum, and for the sums."""
    return 2 * packets * ROWS * 4 * tokens / MEMORY


def table(tokens: int, slow: Link) -> str:
    head = "| ranks | packets gathered | all-gather + merge | `sum`: lanes | `sum` | nodes first |"
    lines = [head, "|" + "---|" * 6]
    for ranks in RANKS:
        gather = gather_time(ranks, tokens, slow) + merge_time(max(ranks, NODE), tokens)
        nodes_first = nodes_first_time(ranks, tokens, slow) + merge_time(
            max(ranks // NODE, 1), tokens
        )
        lines.append(
            f"| {ranks} | {gathered_bytes(ranks, tokens) / 1e6:.1f} MB | {gather:.0f} us | "
            f"{lane_bytes(tokens) / 1e6:.1f} MB | {sum_time(ranks, tokens, slow):.0f} us | "
            f"{nodes_first:.0f} us |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--slow-link", type=float, nargs=2, metavar=("RATE", "STEP"), default=SLOW)
    args = parser.parse_args()
    print(table(args.tokens, Link(*args.slow_link)))


if __name__ == "__main__":
    main()
