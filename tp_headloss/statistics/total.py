"""total = sum of w_j z_j over the columns above -inf, and mass = sum of their w_j (w = 1 without
weights).

| packet rows                                   | merge | d/dz_j             |
|-----------------------------------------------|-------|--------------------|
| total, with the target column                 | sum   | w_j where z_j > -inf |
| mass, with the target column                  | sum   | none               |
"""

import torch

from .family import Family, Joined, Softmax, Tile, row_sum


class TotalFamily(Family):
    statistics = gradients = ("total",)
    packet = values = ("total", "mass")
    in_one_read = ("total",)

    def local(self, tile: Tile, softmax: Softmax, rows) -> dict[str, torch.Tensor]:
        z = tile.z
        weight = (
            torch.ones_like(z) if tile.column_weight is None else tile.column_weight.to(z.dtype)
        )
        absent = z == -torch.inf
        total = row_sum(torch.where(absent, 0.0, z * weight))
        return {"total": total, "mass": row_sum(torch.where(absent, 0.0, weight))}

    def finish(self, sums: dict, joined: Joined) -> tuple[dict, dict]:
        return {"total": sums["total"], "mass": sums["mass"]}, {}

    def direct(self, dz, tile: Tile, merged: dict, grads: dict):
        if "total" not in grads:
            return dz
        g = grads["total"]
        weighted = g if tile.column_weight is None else g * tile.column_weight.to(g.dtype)
        return dz + torch.where(tile.z == -torch.inf, 0.0, weighted)
