"""Two ways to the same objective, cross-entropy + z-loss: with the library on shards, and in plain
torch without it.

Both map (hidden states, labels, tokens) to the loss, a sum over valid tokens divided by the global
number of `tokens`, and to the detached sums over valid tokens named in SUMS.
"""

import torch
import torch.nn.functional as F

SUMS = ("cross_entropy", "z_loss", "entropy", "accuracy")
IGNORE = -100


def sharded_objective(head, terms):
    """head: a `VocabParallelHead`; hidden [B, T, H] and labels [B, T] replicated; no logits.

    terms: cross-entropy, z-loss and maybe others, whose inputs `objective` takes by name."""
    from tp_headloss import HeadLoss

    head_loss = HeadLoss(terms, metrics=("entropy", "accuracy"), ignore_index=IGNORE)

    def objective(hidden, labels, tokens, **inputs):
        out = head(hidden, labels, head_loss=head_loss, denominator=tokens, inputs=inputs)
        named = {**out.terms, **out.metrics}
        return out.loss, torch.stack([named[name] for name in SUMS])

    return objective


def plain_objective(head, vocab, z_weight):
    """head: an nn.Linear of at least `vocab` rows; hidden [B, T, H], labels [B, T]."""

    def objective(hidden, labels, tokens):
        logits = head(hidden)[..., :vocab]
        logits, labels = logits.float().flatten(0, -2), labels.flatten()
        valid = labels != IGNORE
        cross_entropy = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        z_loss = (logits.logsumexp(-1).square() * valid).sum()
        with torch.no_grad():
            log_p = logits.log_softmax(-1)
            entropy = -((log_p.exp() * log_p).sum(-1) * valid).sum()
            correct = (logits.argmax(-1) == labels).sum()
            sums = torch.stack([cross_entropy, z_loss, entropy, correct])
        return (cross_entropy + z_weight * z_loss) / tokens, sums

    return objective
