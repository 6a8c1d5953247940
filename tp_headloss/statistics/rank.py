"""The label's rank in the vocabulary. The label's logit is known before the logits stream by, see `needs_label_logits`.

| statistic | packet row                                              | merge | value                               |
|-----------|---------------------------------------------------------|-------|-------------------------------------|
| rank      | ahead: ids with a larger logit, or an equal one and a   | sum   | ahead + 1: 1 for the likeliest id,  |
|           | lower id                                                |       | V for the least; no gradient        |
"""

import torch

from .family import Family, Joined, Softmax, Tile, Wanted, row_sum


class RankFamily(Family):
    statistics = ("rank",)
    packet = ("ahead",)
    needs_label_logits = True

    def wanted(self, call: Wanted) -> bool:
        return call.has_labels and super().wanted(call)

    def local(self, tile: Tile, softmax: Softmax, rows) -> dict[str, torch.Tensor]:
        z, column = tile.z, torch.arange(tile.z.shape[1], device=tile.z.device)
        label, target = tile.label_logits[:, None], tile.target[:, None]
        return {"ahead": row_sum((z > label) | ((z == label) & (column < target)))}

    def finish(self, sums: dict, joined: Joined) -> tuple[dict, dict]:
        return {"rank": sums["ahead"] + 1}, {}
