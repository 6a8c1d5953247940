"""A batch of sequences with everything that policy-gradient objectives and their metrics take."""

import torch
import torch.nn.functional as F

from tp_headloss import Sequences, VocabShard

V, B, S = 60, 4, 7  # 60 of 128 padded columns
LENGTHS = (7, 1, 0, 4)  # one token, none, and part of the row


def problem(dtype=torch.float32):
    """Logits, labels and inputs; log-ratios of about +-1.5, far from 0, and garbage where a token
    is ignored."""
    generator = torch.Generator().manual_seed(3)
    x = (2 * torch.randn(B, S, V, generator=generator)).to(dtype)
    labels = torch.randint(0, V, (B, S), generator=generator)
    mask = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
    mask[0, 2] = False  # a hole, such as a tool's output
    labels[0, 1] = x[0, 1].argmax()  # one hit
    labels = torch.where(mask, labels, -100)
    log_prob = x.double().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]

    def near(scale):
        return (log_prob + scale * torch.randn(B, S, generator=generator)).to(dtype)

    inputs = {
        "old_log_prob": near(1.0),
        "reference_log_prob": near(1.0),
        "generator_log_prob": near(0.7),
    }
    inputs = {name: torch.where(mask, value, torch.nan) for name, value in inputs.items()}
    inputs["advantages"] = torch.tensor([1.3, -0.7, 0.4, -1.1], dtype=dtype)[:, None].expand(B, S)
    inputs["noise"] = torch.rand(B, S, generator=generator).to(dtype)  # equal in both dtypes
    inputs["rewards"] = torch.tensor([1.0, 0.0, 1.0, -1.0], dtype=dtype)[:, None]
    return x, labels, mask, inputs


def needed(head, inputs, mask, device, **options):
    names = head.input_names
    out = {name: value.to(device) for name, value in inputs.items() if name in names}
    return out | {"sequences": Sequences.from_mask(mask.to(device), **options)}


def shard_of(x, group, device):
    shard = VocabShard.from_group(group, V, 128)
    return shard, F.pad(x, (0, 128 - V), value=50.0)[..., shard.start : shard.stop].clone().to(
        device
    ).requires_grad_()


LOG_PROB = torch.linspace(-3.0, -0.1, 40, dtype=torch.float64)
ADVANTAGES = torch.tensor([1.5, -0.5, 0.0, -2.0], dtype=torch.float64).repeat(10)


def gradient(function, *args, **kwargs):
    log_prob = LOG_PROB.clone().requires_grad_()
    value = function(log_prob, *args, **kwargs)
    return value.detach(), torch.autograd.grad(value.sum(), log_prob)[0]
