"""A few rows of logits with labels, and a policy-gradient head with everything on."""

import torch

import tp_headloss as hl

WANT = ("entropy", "total", "argmax")
V, N = 1000, 8


def rows(device, **kwargs):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, V, generator=generator) * 2
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[3] = -100
    return x.to(device, **kwargs), labels.to(device)


def policy_inputs(labels):
    generator = torch.Generator().manual_seed(1)
    names = ("old_log_prob", "reference_log_prob", "generator_log_prob", "advantages")
    inputs = {
        name: torch.randn(labels.shape, generator=generator).to(labels.device) for name in names
    }
    return inputs | {"sequences": hl.Sequences.from_mask((labels != -100).view(2, -1))}


def policy_head(**options):
    """GRPO's kind of everything."""
    terms = [
        hl.PolicyGradient("gspo"),
        hl.KLToReference(0.1),
        hl.Entropy(0.01),
        hl.CrossEntropy(0.1),
        hl.ZLoss(1e-4),
    ]
    metrics = ("entropy", "accuracy", hl.PolicyMetrics(reference=True), hl.GeneratorMetrics())
    return hl.HeadLoss(terms, metrics=metrics, reduction="seq-mean-token-mean", **options)
