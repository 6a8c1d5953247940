"""64-bit keys that sort by logit, then by id: the larger logit has the larger key, and of equal
ones the lower id."""

import torch

LOW = (1 << 32) - 1  # the bits of a key that hold the id
NO_KEY = torch.iinfo(torch.int64).min  # of no logit, below all others


def _turned(bits: torch.Tensor) -> torch.Tensor:
    """Bits of fp32 numbers, int32, with those of negative numbers in the other order; its own
    inverse."""
    sign = bits >> 31
    return bits ^ (sign & 0x7FFFFFFF)


def ordered_bits(z: torch.Tensor) -> torch.Tensor:
    """int64 in the order of the fp32 numbers z, in [-2^31, 2^31); -0.0 is 0.0."""
    bits = (z + 0.0).view(torch.int32)
    return _turned(bits).long()


def keys_of(z: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys of logits z, fp32, and ids in [0, 2^32), of one shape; no two are equal unless the
    ids are."""
    return (ordered_bits(z) << 32) | (LOW - ids)


def decode_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, fp32, and ids of keys."""
    ordered = (keys >> 32).int()
    ids = LOW - (keys & LOW)
    return _turned(ordered).view(torch.float32), ids
