"""Rows of logits with labels, class weights and token weights."""

import torch

V, N = 100, 12  # 100 of 128 padded columns


def rows(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(N, V, generator=generator) * 2).to(dtype)
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[[2, 7]] = -100
    return x, labels, torch.rand(V, generator=generator) + 0.1, torch.rand(N, generator=generator)
