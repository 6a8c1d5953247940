"""A small decoder-only transformer whose vocabulary matrices hold only the rows of one shard."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from parallel import copy_to_shards, sum_over_shards

SHARDED = ("embedding.weight", "output.weight")  # parameters of `Transformer`; all others are replicated


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of a vocabulary matrix that has `total` rows, padding included."""

    start: int
    stop: int
    total: int

    def normal(self, width: int, std: float, seed: int) -> nn.Parameter:
        # The whole matrix is drawn and then cut, so that it does not depend on the number of shards.
        whole = torch.randn(self.total, width, generator=torch.Generator().manual_seed(seed))
        return nn.Parameter(std * whole[self.start : self.stop])


class VocabParallelEmbedding(nn.Module):
    """ids [B, T] replicated -> [B, T, H] replicated; weight [rows, H] sharded; forward: one all-reduce."""

    def __init__(self, rows, width, seed, group):
        super().__init__()
        self.rows, self.group = rows, group
        self.weight = rows.normal(width, 1.0, seed)

    def forward(self, ids):
        owned = (ids >= self.rows.start) & (ids < self.rows.stop)
        local = F.embedding((ids - self.rows.start).masked_fill(~owned, 0), self.weight)
        return sum_over_shards(local * owned.unsqueeze(-1), self.group)


class VocabParallelOutput(nn.Module):
    """hidden [B, T, H] replicated -> logits [B, T, rows] sharded; backward: one all-reduce of d hidden."""

    def __init__(self, rows, width, seed, group):
        super().__init__()
        self.group = group
        self.weight = rows.normal(width, 0.02, seed)

    def forward(self, hidden):
        return F.linear(copy_to_shards(hidden, self.group), self.weight)


def rotary(length, size):
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        inner = -(-8 * width // 3) // 8 * 8
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class Transformer(nn.Module):
    """The blocks are replicated over the tensor-parallel group, the two vocabulary matrices are sharded."""

    def __init__(self, rows, width, layers, heads, length, seed, group=None):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        # Activations start at a scale of 1. Smaller weights (0.02 everywhere) make early training so unstable that
        # a difference in the last bit, such as another order of summation, grows to 1e-3 within 100 steps.
        for name, p in self.named_parameters():
            if p.ndim > 1:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=(p.shape[1] * (2 * layers if deep else 1)) ** -0.5)
        self.embedding = VocabParallelEmbedding(rows, width, seed + 1, group)
        self.output = VocabParallelOutput(rows, width, seed + 2, group)
        for name, table in zip(("cos", "sin"), rotary(length, width // heads), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, ids):
        """ids [B, T], T at most `length` -> hidden [B, T, H]; `output` turns it into logits."""
        x = self.embedding(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)

    def sharded_parameters(self):
        return [self.get_parameter(name) for name in SHARDED]

    def replicated_parameters(self):
        return [*self.blocks.parameters(), *self.norm.parameters()]

    def load_whole(self, state):
        """Of a state whose vocabulary matrices have all rows [V, H], take this shard's."""
        rows = self.embedding.rows
        self.load_state_dict({**state, **{name: state[name][rows.start : rows.stop] for name in SHARDED}})
