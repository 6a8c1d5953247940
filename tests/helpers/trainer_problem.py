"""Logits and hidden states of a sharded vocabulary, and what RL trainers compute from the whole of
it in float64."""

import torch

B, S, V, PADDED, H, K = 2, 6, 101, 104, 12, 5
EVEN, UNEVEN = [0, 52, 104], [0, 37, 104]
DTYPES = [torch.float32, torch.bfloat16]
WEIGHTS = torch.linspace(-1, 1, 2 * B * S, dtype=torch.float64).view(2, B, S)  # upstream gradients


def data(dtype=torch.float32):
    """Logits [B, S, PADDED], whose padding would win if it took part, and ids [B, S]."""
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(B, S, PADDED, generator=generator)
    logits[..., V:] += 20
    return logits.to(dtype), torch.randint(0, V, (B, S), generator=generator)


def cut(x, group, boundaries=EVEN, dim=-1):
    """This rank's part."""
    if group is None:
        return x.detach().clone().requires_grad_()
    start, stop = boundaries[group.rank()], boundaries[group.rank() + 1]
    return x.narrow(dim, start, stop - start).detach().clone().requires_grad_()


def truth(logits, ids, temperature=1.0, columns=V):
    """log-probs, entropy and sum of p^2 [B, S] in float64, and their leaf."""
    leaf = logits.double().requires_grad_()
    log_p = (leaf[..., :columns] / temperature).log_softmax(-1)
    at = log_p.gather(-1, ids.clamp(0, columns - 1).unsqueeze(-1)).squeeze(-1)
    return at, -(log_p.exp() * log_p).sum(-1), (2 * log_p).exp().sum(-1), leaf


def close(got, expected, rtol=2e-6, atol=2e-6):
    torch.testing.assert_close(got.cpu().double(), expected.detach(), rtol=rtol, atol=atol)


def close_grads(parts, expected, dtype):
    """Of all ranks; one rounding to bf16 is 2^-9."""
    assert all(part.dtype == dtype for part in parts)
    rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (2**-8, 1e-5)
    close(torch.cat([p.cpu() for p in parts], -1), expected, rtol, atol)


def dtype_name(dtype):
    return str(dtype).split(".")[1]


def head():
    generator = torch.Generator().manual_seed(4)
    return torch.randn(B, S, H, generator=generator), torch.randn(PADDED, H, generator=generator)
