"""Rows of logits with a set of ids each, and the float64 truth of the statistics over these
sets."""

import oracle
import torch

from tp_headloss import IdSets
from tp_headloss.statistics import OVER_SETS as NAMES

V, N = 200, 9  # of 256 padded columns


def rows(vocab=V):
    """Logits, labels, and the sets as lists: of any size, in any order, with repeated ids."""
    generator = torch.Generator().manual_seed(11)
    x = 2 * torch.randn(N, vocab, generator=generator)
    labels = torch.randint(0, vocab, (N,), generator=generator)
    sizes = [12, 1, 3, vocab, vocab - 3, 40, 7, 2, 5]
    sets = []
    for i, size in enumerate(sizes):
        others = torch.randperm(vocab, generator=generator)
        members = torch.cat([labels[i : i + 1], others[others != labels[i]][: size - 1]])
        sets.append(members[torch.randperm(size, generator=generator)].tolist())
    labels[2] = -100
    sets[2] += [-5, vocab + 3]  # of an ignored token: never looked at
    sets[0] += sets[0][3:9]  # several times
    for i in (3, 4, 5):
        sets[i] = sorted(sets[i])  # ascending, as samplers leave them
    sets[5] = sorted(sets[5] + sets[5][3:6])  # and with neighbours that are equal
    sets[3] += sets[3][-2:] + sets[3][:2]  # equal ids that are near, and far apart
    x[4] += 300.0  # a shift
    x[6, labels[6]] += 30.0  # confident
    x[7, labels[7]] += 25.0
    x[8, sets[8][:2]] = torch.where(torch.tensor(sets[8][:2]) == labels[8], 1.0, -torch.inf)
    return x, labels, sets


def padded(sets, filler=-1):
    """The sets as `IdSets` [N, K], with the filler at their ends."""
    most = max(map(len, sets))
    ids = torch.tensor([members + [filler] * (most - len(members)) for members in sets])
    mask = None if filler < 0 else torch.tensor([[i < len(m) for i in range(most)] for m in sets])
    return IdSets(ids, mask)


def ragged(sets, dtype=torch.int64):
    sizes = torch.tensor([0, *map(len, sets)])
    ids = torch.tensor([i for members in sets for i in members], dtype=dtype)
    return IdSets.from_csr(ids, sizes.cumsum(0).to(dtype))


def listed(sets):
    """The known ids of each set, tokens in order."""
    ids = (sets.ids if sets.mask is None else sets.ids.masked_fill(~sets.mask, -1)).cpu()
    bounds = None if sets.spans is None else sets.spans.reshape(-1, 2).tolist()
    rows = ids.reshape(-1, ids.shape[-1]) if bounds is None else (ids[a:b] for a, b in bounds)
    return [[i for i in row.tolist() if i >= 0] for row in rows]


def masked(z, sets):
    """z with -inf at all ids that are not in the row's set."""
    out = torch.full_like(z, -torch.inf)
    for i, members in enumerate(sets):
        # once, for autograd
        known = sorted({member for member in members if 0 <= member < z.shape[1]})
        out[i, known] = z[i, known]
    return out


def truth(z, labels, sets):
    """Values [N] in float64 by name."""
    over = oracle.statistics(masked(z, sets), labels)
    mass = (over["lse"] - oracle.statistics(z, labels)["lse"]).clamp(max=0)
    return {"set_log_prob": over["log_prob"], "set_entropy": over["entropy"], "set_log_mass": mass}


def gradient(z, slope, labels, sets, grads):
    """Upstream gradients by name, of statistics over sets and of the softmax -> d/dx [N, V] in
    float64."""
    over = {name.removeprefix("set_"): g for name, g in grads.items() if name in NAMES[:2]}
    whole = {name: g for name, g in grads.items() if name not in NAMES}
    if "set_log_mass" in grads:
        over["lse"] = grads["set_log_mass"]
        whole["lse"] = whole.get("lse", 0.0) - grads["set_log_mass"]
    return oracle.gradient(masked(z, sets), slope, labels, over) + oracle.gradient(
        z, slope, labels, whole
    )
