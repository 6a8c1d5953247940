"""Depths of multi-token prediction that learn from the main head, beside the same losses computed
from whole logits in float64, on two ranks: tensor parallelism, or context parallelism. Runs the
cases of megatron_cases, too, and on four ranks those of megatron_schedule_cases."""

import functools
from types import SimpleNamespace
from unittest import mock

import megatron_cases
import torch
from cases import compared, main, refused
from megatron_cases import (
    HAS_HYBRID,
    B,
    H,
    S,
    batch,
    depths_logged,
    head_name,
    hybrid_of,
    model_of,
    run,
)

# isort: split
# what is above makes Megatron run on CPUs, before it is imported
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer import multi_token_prediction
from megatron_layer_cases import CASES as LAYERS
from megatron_misuse_cases import CASES as MISUSES
from megatron_schedule_cases import CASES as SCHEDULES
from megatron_schedule_cases import config_for, gpt_chunk, layout, microbatches

from tp_headloss import CrossEntropy, Distillation, HeadLoss
from tp_headloss.integrations.megatron import MegatronHead, install
from tp_headloss.integrations.megatron.soft_targets import main_states_of
from tp_headloss.integrations.replacement import replaced

SOFT = [Distillation(1.0, "cross_entropy")]
BOTH = [CrossEntropy(0.25), Distillation(0.75, "cross_entropy")]


def log_probs_of(logits):
    """[s, b, V] float64 of this rank's logits [s, b, V/P]."""
    return gather_from_tensor_model_parallel_region(logits).double().log_softmax(-1)


def of_labels(log_probs, labels):
    return -log_probs.gather(-1, labels.transpose(0, 1).unsqueeze(-1)).squeeze(-1)


class WholeLogits:
    """Losses [b, s] of a model from the whole logits of every head. A depth's target at position t
    is the main head's distribution at position t + depth (+ an error); beyond the end there is
    none, and the mask is 0.

    positions: this rank's part of the sequence, in the order in which it has them; None: all of it.
    """

    def __init__(self, hard=0.0, error=0, positions=None):
        self.hard, self.error, self.positions = hard, error, positions

    def record(self, labels, logits):
        self.main = log_probs_of(logits)  # of the last call, which is the main head's
        return torch.zeros(labels.shape)

    def main_by_position(self):
        """{position: [b, V]} probabilities, of all context-parallel ranks."""
        group = parallel_state.get_context_parallel_group()
        parts, places = [None] * group.size(), [None] * group.size()
        positions = list(range(len(self.main))) if self.positions is None else self.positions
        torch.distributed.all_gather_object(parts, self.main.detach().exp(), group=group)
        torch.distributed.all_gather_object(places, positions, group=group)
        return positions, {t: x for where, part in zip(places, parts) for t, x in zip(where, part)}

    def losses(self, main_labels, labels, logits):
        log_probs = log_probs_of(logits)
        hard = of_labels(log_probs, labels)
        if labels is main_labels:
            return hard.transpose(0, 1).float()
        self.depth += 1
        target = torch.zeros_like(log_probs)
        for i, t in enumerate(self.places):
            target[i] = self.probabilities.get(t + self.depth + self.error, torch.zeros(()))
        soft = -(target * log_probs).sum(-1)
        return (self.hard * hard + (1 - self.hard) * soft).transpose(0, 1).float()

    def __call__(self, model, labels, forward):
        """Run `forward`, which calls the model with these labels, with the losses from whole logits
        in place."""
        with replaced(model, compute_language_model_loss=self.record), torch.no_grad():
            forward(record=True)
        self.depth, (self.places, self.probabilities) = 0, self.main_by_position()
        depths_logged()
        with replaced(model, compute_language_model_loss=functools.partial(self.losses, labels)):
            return forward(record=False)


def inputs():
    return batch()[3], torch.ones(B, S).index_fill(1, torch.tensor(3), 0)


def whole(make, **kwargs):
    """-> losses and gradients of a new model, and what Megatron logged of its depths."""
    model, (labels, mask) = make(), inputs()

    def forward(record):
        if record:
            return model(*batch()[:3], labels=labels, loss_mask=mask)
        return run(model, labels, loss_mask=mask)

    return *WholeLogits(**kwargs)(model, labels, forward), depths_logged()


def largest_difference(ours, theirs):
    return max(
        float(((ours[n] - theirs[n]) / theirs[n]).abs().max())
        for n in theirs
        if "loss" in n or n == "values"
    )


def soft(make=model_of, terms=None, hard=0.0, **kwargs):
    def case(group):
        layout(tp=2)
        make_model = functools.partial(make, mtp=True, **kwargs)
        *theirs, logged = whole(make_model, hard=hard)
        others = [whole(make_model, hard=hard, error=error)[2] for error in (-1, 1)]
        model, (labels, mask) = make_model(), inputs()
        head = MegatronHead(ignore_index=-100, depth_terms=terms or SOFT)
        with install(model, head):
            depths_logged()
            ours = run(model, labels, loss_mask=mask)
        found = depths_logged()
        assert found.keys() == logged.keys()
        for name in set(found) - {"values"}:  # accepted tokens, from 0.19 on
            assert "loss" in name or torch.equal(found[name], logged[name]), name
        assert not any(module._forward_hooks for module in model.modules())
        return compared(*ours, *theirs, head_name(model)) | {
            "logged": largest_difference(found, logged),
            "off by one is seen": min(largest_difference(other, logged) for other in others) > 1e-3,
        }

    return case


def context_parallel(group):
    """Each rank has two parts of a sequence: the targets at their ends are another rank's, or
    another part's."""
    layout(cp=2)
    rank = parallel_state.get_context_parallel_rank()
    ids, positions, labels, _ = next(iter(microbatches()))
    mask, places = torch.ones(B, S), positions[0].tolist()
    found = []
    for kind in ("whole", "ours"):
        torch.manual_seed(7)
        chunk = gpt_chunk(
            config_for(None, False, mtp=True), False, pre_process=True, post_process=True
        )

        def forward(record, chunk=chunk):
            losses = chunk(ids, positions, None, labels=labels, loss_mask=mask)
            if not record:
                (losses * (1 + rank)).sum().backward()
            return losses.detach()

        if kind == "whole":
            losses = WholeLogits(positions=places)(chunk, labels, forward)
        else:
            with install(chunk, MegatronHead(ignore_index=-100, depth_terms=SOFT)):
                losses = forward(record=False)
        found.append((losses, {n: p.grad for n, p in chunk.named_parameters()}))
    return compared(*found[1], *found[0], "output_layer.weight")


def packed(group):
    """Sequences that share a row: beyond the end of each there is nothing, as Megatron has no
    labels there."""
    layout(tp=2)
    model, ends, found = model_of(mtp=True, sp=True), [0, 5, 6, 2 * S], []
    states = torch.randn(3 * 2 * S, 1, H, generator=torch.Generator().manual_seed(1)).chunk(3)
    parts = [x.chunk(group.size())[group.rank()] for x in states]  # of the main head and two depths
    with main_states_of(
        model, torch.cat(parts), SimpleNamespace(cu_seqlens_q=torch.tensor(ends))
    ) as main_states:
        for depth in (1, 2):
            expected = torch.zeros_like(states[0])
            for t in range(2 * S):
                if t + depth < min(end for end in ends if end > t):
                    expected[t] = states[0][t + depth]
            found.append(
                torch.equal(main_states.moved(), expected.chunk(group.size())[group.rank()])
            )
    return {"equal": all(found)}


def refusals(group):
    layout(tp=2)
    head, model = MegatronHead(ignore_index=-100, depth_terms=SOFT), model_of()
    words = "a model with depths of multi-token prediction, got fused=True and mtp_num_layers=None"
    refused(lambda: install(model, head), words)
    refused(
        lambda: install(model_of(mtp=True), head, fused=False),
        "got fused=False and mtp_num_layers=2",
    )
    given = {
        "hidden_states": torch.zeros(S, B, H),
        "output_layer": model.output_layer,
        "output_weight": None,
    }
    given |= {"labels": batch()[3], "scale_logits": None, "config": model.config}
    refused(lambda: head(**given), "through an output_processor: use install(model, head)")
    words = "terms must be Terms, got Distillation: call it"
    refused(lambda: MegatronHead(ignore_index=-100, depth_terms=Distillation), words, TypeError)
    return {}


def counted(group):
    """The likeliest ids are looked for where Megatron counts them: in training, from 0.19 on."""
    layout(tp=2)
    model, head, wants, linear = (
        model_of(mtp=True),
        MegatronHead(ignore_index=-100),
        [],
        HeadLoss.linear,
    )
    counts = hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts")

    def observed(loss, *args, **kwargs):
        wants.append(loss.want)
        return linear(loss, *args, **kwargs)

    with install(model, head), mock.patch.object(HeadLoss, "linear", observed):
        for training in (True, False):
            model.train(training)
            wants.clear()
            model(*batch()[:3], labels=batch()[3])
            depth = ("argmax",) if counts and training else ()
            assert wants == [depth, depth, ()], (training, wants)
    return {"counted": True}


CASES = {
    "soft": soft(), "soft, sp, tied": soft(sp=True, tied=True), "soft and hard": soft(terms=BOTH, hard=0.25),
    "soft, refusals": refusals, "counted": counted, "cp": context_parallel, "packed": packed,
}  # fmt: skip
if HAS_HYBRID:
    CASES |= {
        "soft, detached heads": soft(mtp_detach_heads=True),
        "soft, hybrid, sp": soft(hybrid_of, sp=True),
    }
    CASES |= {"soft, mup": soft(use_mup=True, mup_base_hidden_size=16)}

if __name__ == "__main__":  # and all others: one import of Megatron for all
    main({2: megatron_cases.CASES | CASES | LAYERS | MISUSES, 4: SCHEDULES}, megatron_cases.begin)
