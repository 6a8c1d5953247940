"""A small decoder-only transformer whose vocabulary matrices hold only the rows of one shard."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from tp_headloss import Init, VocabParallelEmbedding, VocabParallelHead, VocabShard


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
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = (
            nn.Linear(width, 2 * inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class Transformer(nn.Module):
    """The blocks are replicated over the tensor-parallel group, the two vocabulary matrices are
    sharded.

    plain: torch's own modules for these two, with the same numbers, for a whole vocabulary."""

    def __init__(self, shard: VocabShard, width, layers, heads, length, seed, plain=False):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        # Activations start at a scale of 1. Smaller weights (0.02 everywhere) make early training
        # so unstable that a difference in the last bit, such as another order of summation, grows
        # to 1e-3 within 100 steps.
        # steps.
        for name, p in self.named_parameters():
            if p.ndim > 1:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=(p.shape[1] * (2 * layers if deep else 1)) ** -0.5)
        self.embedding = VocabParallelEmbedding(width, shard, init=Init(1.0, seed + 1))
        self.output = VocabParallelHead(width, shard, init=Init(0.02, seed + 2))
        if plain:
            embedding, output = self.embedding.weight, self.output.weight
            self.embedding = nn.Embedding(*embedding.shape, _weight=embedding.data)
            self.output = nn.Linear(width, shard.width, bias=False)
            self.output.weight.data = output.data
        for name, table in zip(("cos", "sin"), rotary(length, width // heads), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, ids):
        """ids [B, T], T at most `length` -> hidden [B, T, H]; `output` turns it into logits or
        losses."""
        x = self.embedding(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x)

    def distribute(self, mesh) -> None:
        """Make the vocabulary matrices DTensors over mesh["tp"], and cut all parameters over
        mesh["dp"] (FSDP2).

        The gradients are then means over the data-parallel ranks. A dimension of one rank changes
        nothing."""
        if mesh["tp"].size() > 1:
            self.embedding.to_dtensor(mesh["tp"])
            self.output.to_dtensor(mesh["tp"])
        if mesh["dp"].size() > 1:
            # nothing writes into it
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            for part in (self.embedding, *self.blocks, self.output, self):
                fully_shard(part, mesh=mesh["dp"])
            register_fsdp_forward_method(self.output, "statistics")

    def sharded_parameters(self):
        return [self.embedding.weight, self.output.weight]

    def replicated_parameters(self):
        return [*self.blocks.parameters(), *self.norm.parameters()]
