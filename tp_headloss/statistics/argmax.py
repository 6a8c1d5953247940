"""argmax: the vocabulary id of the largest logit, the lowest on ties; hits: whether it is the
label. No gradient.

| packet row                       | merge                        |
|----------------------------------|------------------------------|
| index of max, the target apart   | index of the largest max     |
"""

import torch

from .family import Family, Joined, Merging, Softmax, Tile, Wanted


class ArgmaxFamily(Family):
    statistics = ("argmax",)
    packet = ("index",)
    values = ()
    adds_up = False
    in_one_read = ("argmax",)

    def flags(self, call: Wanted) -> dict[str, torch.dtype]:
        return {"argmax": torch.int64} | ({"hits": torch.bool} if call.has_labels else {})

    def local(self, tile: Tile, softmax: Softmax, rows) -> dict[str, torch.Tensor]:
        return {"index": softmax.z.max(-1).indices + tile.first_id}

    def merge(self, rows: dict, merging: Merging) -> dict[str, torch.Tensor]:
        return {
            "index": torch.where(merging.peak == merging.shift, rows["index"], torch.inf).amin(0)
        }

    def join(self, sums: dict, joined: Joined) -> dict[str, torch.Tensor]:
        index, labels = sums["index"], joined.labels
        if labels is not None:
            wins = (joined.target > joined.shift) | (
                (joined.target == joined.shift) & (labels < index)
            )
            index = torch.where(wins, labels.double(), index)
        return {"index": index}

    def finish(self, sums: dict, joined: Joined) -> tuple[dict, dict]:
        argmax = torch.where(joined.bad | joined.ignored, -1.0, sums["index"]).long()
        flags = {"argmax": argmax}
        if joined.labels is not None:
            flags["hits"] = (argmax == joined.labels) & ~joined.ignored & ~joined.bad
        return flags, {}
