"""A decoder of a few layers, and the Python sources that are installed here as its text, cut into
words."""

import collections
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

LENGTH = 512  # of a piece of text, in words


class Block(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.heads = max(1, hidden // 64)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.attend, self.project = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.widen, self.narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        n, length, hidden = x.shape
        parts = self.attend(self.norms[0](x)).view(n, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(n, length, hidden))
        return x + self.narrow(F.gelu(self.widen(self.norms[1](x))))


class Decoder(nn.Module):
    """Ids [B, S] -> hidden states [B, S, H]; the weight of the head is its own."""

    def __init__(self, ids: int, hidden: int, layers: int):
        super().__init__()
        self.embed, self.places = nn.Embedding(ids, hidden), nn.Embedding(LENGTH, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Parameter(torch.randn(ids, hidden) * 0.02)
        for embedding in (self.embed, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids):
        x = self.embed(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def words_of_sources(megabytes: int) -> list[str]:
    """The words of Python files that come with torch."""
    words, left = [], megabytes << 20
    for path in sorted(Path(torch.__file__).parents[1].rglob("*.py")):
        text = path.read_text(errors="ignore")[:left]
        words += re.findall(r"\w+|[^\w\s]| +|\n", text)
        left -= len(text)
        if left <= 0:
            break
    return words


def numbered(words: list[str], ids: int) -> torch.Tensor:
    """Words as ids, by frequency; the last id is for all that are too rare."""
    known = [word for word, _ in collections.Counter(words).most_common(ids - 1)]
    number = {word: i for i, word in enumerate(known)}
    return torch.tensor([number.get(word, ids - 1) for word in words], dtype=torch.int32)


def batches(text: torch.Tensor, tokens: int, steps: int, seed: int):
    """Random pieces of the text, the same for each seed."""
    generator = torch.Generator().manual_seed(seed)
    length = min(LENGTH, tokens)
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (tokens // length,), generator=generator)
        yield torch.stack([text[i : i + length + 1] for i in starts.tolist()]).long()
