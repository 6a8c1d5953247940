"""Random numbers that are a function of (seed, counter), so that any rank can make those of its own
columns."""

import torch

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key after each round
WORD = 0xFFFFFFFF
# elements whose temporaries stay in a core's cache: 6 times faster there than 2^20 at once
CPU_PIECE = 1 << 15


def philox4x32(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): four
    words of 32 bits.

    Args:
        counter: four words in [0, 2^32), int64 tensors of one shape.
        key: two words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 wraps around, which leaves the bits of the unsigned products
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        high0, low0 = product0 >> 32 & WORD, product0 & WORD
        high1, low1 = product1 >> 32 & WORD, product1 & WORD
        c0, c1 = high1 ^ c1 ^ k0, low1
        c2, c3 = high0 ^ c3 ^ k1, low0
        k0 = k0 + WEYL[0] & WORD
        k1 = k1 + WEYL[1] & WORD
    return c0, c1, c2, c3


def exponential(seed: int, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard exponential variates in float64, each a function of (seed, position, id) alone.

    They have 52 random bits, fine enough near 0 for the rarest ids. The key is the seed, low word
    first, and the counter the words (position low, position high, id, 0).

    Args:
        seed: in [0, 2^64).
        positions, ids: int64 [n]; ids in [0, 2^32).
    """
    key = seed & WORD, seed >> 32
    piece = CPU_PIECE if ids.device.type == "cpu" else max(1, len(ids))
    pieces = zip(positions.split(piece), ids.split(piece))
    return torch.cat([_exponential(key, position, id_) for position, id_ in pieces])


def _exponential(key, position, id_) -> torch.Tensor:
    counter = position & WORD, position >> 32 & WORD, id_, torch.zeros_like(id_)
    high, low, *_ = philox4x32(counter, key)
    bits = (high << 20) | (low >> 12)
    uniform = (bits.double() + 0.5) * 2.0**-52
    return -torch.log(1.0 - uniform)  # the difference is exact: an odd multiple of 2^-53 below 1
