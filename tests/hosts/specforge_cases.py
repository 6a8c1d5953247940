"""SpecForge's own EAGLE-3 losses and teacher, and ours over two ranks of the draft's vocabulary."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"  # for SpecForge's own loss, before Triton is imported
import torch
from cases import compared, main, relative_errors
from pages import marked_block
from specforge.algorithms.eagle3 import model as eagle3
from specforge.core import compact_teacher, lk_loss
from specforge.core.eagle3_adapters import SdpaLikeAdapter
from specforge.utils import padding

from tp_headloss import VocabShard, select_rows
from tp_headloss.integrations import specforge as ours

B, S, V, V_T, H, STEPS = 2, 12, 24, 50, 16, 3
g = torch.Generator().manual_seed(7)
hidden = torch.randn(B, S, H, generator=g)
weight = torch.randn(V_T, H, generator=g) / 2
noise = torch.randn(B, S, V, generator=g)
loss_mask = (torch.rand(B, S, 1, generator=g) < 0.8).int()
t2d = torch.zeros(V_T, dtype=torch.bool)
t2d[torch.randperm(V_T, generator=g)[:V]] = True
d2t = t2d.nonzero()[:, 0] - torch.arange(V)
likely = (hidden @ weight.T)[..., t2d]
draft = noise + 0.5 * sum(likely.roll(-k, 1) for k in range(STEPS))  # often right, at each step
NAMES = ("target_p", "target_p_on_draft", "target_token_ids", "position_mask")


def host_teacher(dtype=torch.float32):
    return compact_teacher.compute_target_p_padded_from_hidden(
        hidden=hidden.to(dtype), lm_head_weight=weight.to(dtype), t2d=t2d, loss_mask=loss_mask, length=STEPS
    )  # fmt: skip


def shards(group):
    return VocabShard.from_group(group, V_T), VocabShard.from_group(group, V)


def columns(x, shard):
    return x[..., shard.start : shard.stop].contiguous()


def teacher(group, dtype):
    """The target's probabilities, ids and mask."""
    shard, draft_shard = shards(group)
    rows = weight[shard.start : min(shard.stop, V_T)].to(dtype)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, shard.width - len(rows)))
    given = {"t2d": t2d, "loss_mask": loss_mask, "length": STEPS}
    found = ours.compute_target_p_padded_from_hidden(
        hidden=hidden.to(dtype), lm_head_weight=rows, shard=shard, **given
    )
    theirs = host_teacher(dtype)
    expected = [columns(x, draft_shard) for x in theirs[:2]]
    errors = [relative_errors({"": a}, {"": b})[""] for a, b in zip(found, expected)]
    same = all(torch.equal(a, b) for a, b in zip(found[2:], theirs[2:]))
    return {"target_p": errors[0], "on_draft": errors[1], "same": same}


class Model(SimpleNamespace):
    """What SpecForge's method reads of a model."""


def model_of(kind):
    return Model(
        lk_loss_type=kind, kl_scale=0.9, kl_decay=2.0, draft_model=SimpleNamespace(d2t=d2t)
    )


def step(function, logits, part, kind, index):
    """The seven results of a step, and the gradient of the logits."""
    target_p, on_draft, ids, position_mask = host_teacher()
    counts = loss_mask
    for _ in range(index):  # as its loop over steps does
        position_mask, counts = padding(position_mask, left=False), padding(counts, left=False)
    model = model_of(kind)
    adapter = SdpaLikeAdapter(model)
    view = adapter.step_view(
        idx=index, ttt_length=STEPS, global_input_ids=None, attention_mask=None,
        loss_mask=counts, position_ids=None, hidden_states=None, target_p_padded=part(target_p),
        target_p_on_draft_padded=part(on_draft), target_token_ids_padded=ids,
        position_mask=position_mask, seq_length=S,
    )  # fmt: skip
    x = part(logits).clone().requires_grad_()
    outs = function(
        model,
        logits=x,
        **{name: getattr(view, name) for name in NAMES},
        loss_mask=counts,
        adapter=adapter,
    )
    (2.5 * outs[2]).backward()
    return outs, x.grad


def loss(group, kind, index, through_the_page):
    draft_shard = shards(group)[1]
    own = eagle3.OnlineEagle3Model._acc_and_loss
    expected, grad = step(own, draft, lambda x: x, kind, index)
    function = (
        installed(group).OnlineEagle3Model._acc_and_loss
        if through_the_page
        else lambda *args, **given: ours.acc_and_loss(*args, **given, shard=draft_shard)
    )
    found, own_grad = step(function, draft, lambda x: columns(x, draft_shard), kind, index)
    eagle3.OnlineEagle3Model._acc_and_loss = own
    result = compared(found[2], {"": own_grad}, expected[2], {"": columns(grad, draft_shard)}, "")
    others = [
        relative_errors({"": a.double()}, {"": b.double()})[""] for a, b in zip(found, expected)
    ]
    assert 0 < expected[0] < 1 and 0 < expected[1] < 1, expected
    return result | {"others": max(others)}


def installed(group):
    """SpecForge's module after the block of the guide."""
    shard, draft_shard = shards(group)
    rows = weight[shard.start : min(shard.stop, V_T)]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, shard.width - len(rows)))
    scope = {"shard": shard, "draft_shard": draft_shard}
    scope["target_rows"] = select_rows(rows, t2d.nonzero()[:, 0], shard=shard)

    class Subject(Model):
        _acc_and_loss = eagle3.OnlineEagle3Model._acc_and_loss

    before = eagle3.compute_target_p_padded_from_hidden
    exec(compile(marked_block("host", "specforge"), "docs", "exec"), scope)
    replaced = eagle3.compute_target_p_padded_from_hidden
    eagle3.compute_target_p_padded_from_hidden = before
    found = replaced(hidden=hidden, lm_head_weight=rows, t2d=t2d, loss_mask=loss_mask, length=STEPS)
    torch.testing.assert_close(found[0], columns(host_teacher()[0], draft_shard))

    # a method of a class, called as SpecForge's model calls it
    bound = eagle3.OnlineEagle3Model._acc_and_loss
    return SimpleNamespace(OnlineEagle3Model=SimpleNamespace(_acc_and_loss=bound))


def rate(group):
    draft_shard = shards(group)[1]
    _, on_draft, _, mask = host_teacher()
    found = {}
    for name, function, part, options in (
        ("host", lk_loss.compute_acceptance_rate, lambda x: x, {}),
        ("ours", ours.compute_acceptance_rate, lambda x: columns(x, draft_shard), {"shard": draft_shard}),
    ):  # fmt: skip
        x = part(draft).clone().requires_grad_()
        given = {"logits": x, "target_probs": part(on_draft[:, :S]), "position_mask": mask}
        rate, log_rate = function(**given, **options)
        (2 * rate - 3 * log_rate).backward()
        found[name] = (rate, log_rate), columns(x.grad, draft_shard) if name == "host" else x.grad
    values, grad = found["ours"]
    host_values, host_grad = found["host"]
    stacked = torch.stack(values), torch.stack(host_values)
    return compared(stacked[0], {"": grad}, stacked[1], {"": host_grad}, "")


def signatures(group):
    """Ours take what SpecForge's take, in the same way."""
    for function, own in (
        (ours.compute_acceptance_rate, lk_loss.compute_acceptance_rate),
        (ours.compute_loss_and_acceptance_rate, eagle3._compute_loss_and_acceptance_rate),
        (ours.acc_and_loss, eagle3.OnlineEagle3Model._acc_and_loss),
        (ours.compute_target_p_padded_from_hidden, eagle3.compute_target_p_padded_from_hidden),
    ):
        theirs = {n: p.default for n, p in inspect.signature(own).parameters.items()}
        mine = {n: p.default for n, p in inspect.signature(function).parameters.items()}
        theirs["model"] = theirs.pop("self", None)
        keywords = {n for n in theirs if n not in ("hidden", "lm_head_weight", "model")}
        assert all(mine[n] == theirs[n] for n in keywords), (function.__name__, theirs, mine)
    return {}


def case(function, *args):
    return lambda group: function(group, *args)


CASES = {
    **{f"loss-{kind}-{k}": case(loss, kind, k, False) for kind in (None, "alpha", "lambda") for k in (0, 2)},
    "loss-documented": case(loss, "lambda", 1, True),
    "rate": rate,
    **{f"teacher-{str(d).split('.')[1]}": case(teacher, d) for d in (torch.float32, torch.bfloat16)},
    "signatures": signatures,
}  # fmt: skip

if __name__ == "__main__":
    main(CASES)
