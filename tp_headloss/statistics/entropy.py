"""entropy = -sum p log p = log S - sum p (z - M), in nats.

| packet row                              | merge (f = exp(max - M))    | d/dz_j                |
|-----------------------------------------|-----------------------------|-----------------------|
| moment = sum exp(z - max)(z - max)      | f (moment + (max - M) sum)  | -p_j (log p_j + H)    |
"""

import torch

from .family import Family, Joined, Softmax, Tile, row_sum


class EntropyFamily(Family):
    statistics = gradients = wide_gradients = ("entropy",)
    packet = ("moment",)
    merged = ("mean",)  # sum p (z - M)
    in_one_read = ("entropy",)

    def local(self, tile: Tile, softmax: Softmax, rows) -> dict[str, torch.Tensor]:
        shifted = softmax.shifted
        return {"moment": row_sum(torch.where(shifted == -torch.inf, 0.0, softmax.exp * shifted))}

    def rescale(self, rows: dict, drop, factor) -> dict[str, torch.Tensor]:
        return {"moment": factor * (rows["moment"] + drop * rows["sum"])}

    def target(self, p, offset) -> dict[str, torch.Tensor]:
        return {"moment": torch.where(p == 0, 0.0, p * offset)}

    def finish(self, sums: dict, joined: Joined) -> tuple[dict, dict]:
        mean = sums["moment"] / joined.whole
        return {"entropy": joined.log_sum - mean}, {"mean": mean}

    def coefficient(self, coefficient, shifted, weight, merged: dict, grads: dict):
        if "entropy" not in grads:
            return coefficient
        return coefficient - grads["entropy"] * torch.where(
            shifted == -torch.inf, 0.0, shifted - merged["mean"]
        )
