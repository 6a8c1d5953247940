"""The label's rank in the vocabulary, by a second exchange: whoever counts must know the label's logit.

| statistic | packet row of the second exchange                            | value                       |
|-----------|--------------------------------------------------------------|-----------------------------|
| rank      | ids with a larger logit, or an equal one and a lower id; the | 1 for the likeliest id, V   |
|           | label itself                                                 | for the least; no gradient  |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .family import Family, Joined, Tile, Wanted, row_sum

if TYPE_CHECKING:
    from ..request import Facts


class RankFamily(Family):
    statistics = ("rank",)

    def streams(self, call: Wanted) -> bool:
        return False

    def merged_rows(self, call: Wanted) -> tuple[str, ...]:
        """z of the label."""
        return ("rank_target",)

    def value_rows(self, call: Wanted) -> tuple[str, ...]:
        return ()

    def second_rows(self, call: Wanted) -> tuple[str, ...]:
        return self.statistics

    def finish(self, sums: dict, joined: Joined) -> tuple[dict, dict]:
        return {}, {"rank_target": joined.target}

    def second(self, name: str, tile: Tile, merged: dict, facts: Facts) -> tuple[torch.Tensor, torch.Tensor]:
        column, target = torch.arange(tile.z.shape[1], device=tile.z.device), tile.target[:, None]
        before = (tile.z > merged["rank_target"]) | ((tile.z == merged["rank_target"]) & (column < target))
        counted = torch.where(column == target, True, before)
        return row_sum(counted), torch.zeros_like(merged["rank_target"][:, 0])
