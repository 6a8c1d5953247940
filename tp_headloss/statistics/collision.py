"""collision = sum p_j^2, the probability that two draws agree (verl: sum_pi_squared).

| packet row                          | merge (f = exp(max - M)) | d/dz_j                    |
|-------------------------------------|--------------------------|---------------------------|
| squares = sum exp(z - max)^2        | f^2 squares              | 2 p_j (p_j - collision)   |
"""

import torch

from .family import Family, Joined, Softmax, Tile, row_sum


class CollisionFamily(Family):
    statistics = gradients = merged = ("collision",)
    packet = ("squares",)

    def local(self, tile: Tile, softmax: Softmax, rows) -> dict[str, torch.Tensor]:
        return {"squares": row_sum(softmax.exp.square())}

    def rescale(self, rows: dict, drop, factor) -> dict[str, torch.Tensor]:
        return {"squares": factor * factor * rows["squares"]}

    def target(self, p, offset) -> dict[str, torch.Tensor]:
        return {"squares": p * p}

    def finish(self, sums: dict, joined: Joined) -> tuple[dict, dict]:
        collision = sums["squares"] / joined.whole / joined.whole
        return {"collision": collision}, {"collision": collision}

    def coefficient(self, coefficient, shifted, weight, merged: dict, grads: dict):
        if "collision" not in grads:
            return coefficient
        return coefficient + 2 * grads["collision"] * (weight - merged["collision"])
