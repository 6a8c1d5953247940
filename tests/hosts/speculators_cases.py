"""speculators' own losses, metrics and EAGLE-3 model, and ours over two ranks of the draft's
vocabulary."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from cases import compared, main, relative_errors
from pages import marked_block
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import eager, resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, core, metrics
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

from tp_headloss import VocabShard
from tp_headloss.integrations import speculators as ours

S, V, V_T, H, STEPS = 16, 24, 40, 32, 3
CONFIG = '{"lk_hybrid": 1.0, "ce": 0.1}'
NAMES = ("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid")
ALL = '{"kl_div": 0.5, "rkl": 0.1, "jsd": 0.2, "ce": 0.3, "tv": 0.4, "nla": 0.6, "lk_hybrid": 0.7}'
g = torch.Generator().manual_seed(7)
target = 2 * torch.randn(1, S, V, generator=g)
draft = torch.randn(1, S, V, generator=g) + 0.7 * (target + target.roll(-1, 1))
mask = torch.rand(1, S, generator=g) < 0.8
upstream = torch.linspace(-1, 2, S)[None]


def columns(x, shard, dim=-1):
    return x.narrow(dim, shard.start, shard.width).contiguous()


def loss(group, name, dtype):
    shard = VocabShard.from_group(group, V)
    whole = draft.to(dtype, copy=True).requires_grad_()
    expected = resolve_loss_config(name, "eager")[name][0](whole, target.to(dtype))
    (expected * upstream).sum().backward()
    x = columns(draft.to(dtype), shard).requires_grad_()
    config = ours.resolve_loss_config(name, shard=shard)
    found = config[name][0](x, columns(target.to(dtype), shard))
    (found * upstream).sum().backward()
    grads = {"": x.grad}, {"": columns(whole.grad, shard)}
    return compared(found, grads[0], expected, grads[1], "")


def step(group, index, with_mask):
    """One step's loss and metrics, and what is written."""
    shard = VocabShard.from_group(group, V)
    found = {}
    for name, function, part, config in (
        ("host", metrics.compute_metrics, lambda x: x, resolve_loss_config(ALL, "eager")),
        ("ours", ours.compute_metrics, lambda x: columns(x, shard), ours.resolve_loss_config(ALL)),
    ):
        options = {"shard": shard} if name == "ours" else {}
        x = part(draft).clone().requires_grad_()
        so_far = (upstream > 0).clone()
        given = x, part(target), mask if with_mask else None, so_far, index, 0.8
        value, said = function(*given, loss_config=config, **options)
        value.backward()
        found[name] = value, said, so_far, x.grad
    value, said, so_far, grad = found["ours"]
    host_value, host_said, host_so_far, host_grad = found["host"]
    assert torch.equal(so_far, host_so_far)
    only_here = {f"accept_rate_{index}_sum", f"accept_rate_{index}_total"}
    assert said.keys() - host_said.keys() == only_here
    errors = relative_errors({n: said[n].double() for n in host_said}, host_said)
    result = compared(value, {"": grad}, host_value, {"": columns(host_grad, shard)}, "")
    return result | {"others": max(errors.values())}


def draft_model():
    torch.manual_seed(3)
    layer = LlamaConfig(
        vocab_size=V_T, hidden_size=H, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, attn_implementation="eager",
    )  # fmt: skip
    layer._attn_implementation = "eager"
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=V, eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        norm_before_residual=False,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
    )  # fmt: skip
    model = Eagle3DraftModel(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model.lm_head.weight.requires_grad_()
    return model


def batch():
    return {
        "hidden_states": torch.randn(1, S, 3 * H, generator=torch.Generator().manual_seed(1)),
        "verifier_last_hidden_states": torch.randn(1, S, H, generator=torch.Generator().manual_seed(2)),
        "input_ids": torch.arange(S)[None] % V_T,
        "document_ids": torch.zeros(1, S, dtype=torch.long),
        "loss_mask": mask,
        "ttt_steps": STEPS,
        "ttt_step_loss_decay": 0.8,
    }  # fmt: skip


class Gathered(torch.autograd.Function):
    """Logits of a head whose rows are sharded: the gradient of its input is summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def trained(model, **options):
    _, value, said = model(**batch(), **options)
    value.backward()
    return (
        value.detach(),
        said,
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    )


def as_documented(group, model, shard):
    """From logits, of a head whose rows are sharded."""
    model.lm_head.register_forward_pre_hook(lambda _, x: (Gathered.apply(x[0], group),))
    scope = {"draft_shard": shard, "model": model, "batch": batch()}
    exec(compile(marked_block("host", "speculators"), "docs", "exec"), scope)
    assert 0 < scope["rate"] < 1
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return scope["loss"].detach(), scope["metrics"], grads


def without_logits(group, model, shard):
    scope = {
        "core": core,
        "speculators": ours,
        "partial": partial,
        "draft_shard": shard,
        "model": model,
    }
    exec(compile(marked_block("host", "speculators-heads"), "docs", "exec"), scope)
    return trained(model, loss_config=ours.resolve_loss_config(CONFIG))


def eagle3(group, function):
    """Three steps of speculators' model, with its own losses and with a block of the guide."""
    shard = VocabShard.from_group(group, V)
    host = draft_model()
    model = copy.deepcopy(host)
    value, said, grads = trained(host, loss_config=resolve_loss_config(CONFIG, "eager"))
    for head in (model.lm_head, model.verifier_lm_head):
        trains = head.weight.requires_grad
        head.weight = torch.nn.Parameter(columns(head.weight.detach(), shard, 0), trains)
    with mock.patch.object(core, "compute_metrics"):
        found, told, own = function(group, model, shard)
    grads["lm_head.weight"] = columns(grads["lm_head.weight"], shard, 0)
    assert len(grads) > 8
    result = compared(found, own, value, grads, "lm_head.weight")
    errors = relative_errors({n: told[n].double() for n in said}, said)
    return result | {"others": max(errors.values())}


def signatures(group):
    """Ours take what speculators' take, in the same way, and all of its losses are here."""
    assert set(resolve_loss_config(ALL)) == {*NAMES} == set(ours._FUNCTIONS)
    pairs = [(getattr(ours, f.__name__), f) for f, _ in resolve_loss_config(ALL, "eager").values()]
    assert len(pairs) == len(NAMES) and all(f in vars(eager).values() for _, f in pairs)
    pairs += [
        (ours.resolve_loss_config, resolve_loss_config),
        (ours.compute_metrics, metrics.compute_metrics),
    ]
    for function, own in pairs:
        theirs = [(p.name, p.default) for p in inspect.signature(own).parameters.values()]
        mine = [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
        assert mine[: len(theirs)] == theirs, (function.__name__, mine, theirs)
    return {}


def case(function, *args):
    return lambda group: function(group, *args)


CASES = {
    **{f"loss-{name}": case(loss, name, torch.float32) for name in NAMES},
    "loss-bfloat16": case(loss, "lk_hybrid", torch.bfloat16),
    **{f"step-{k}": case(step, k, k < 2) for k in range(STEPS)},
    "eagle3-logits": case(eagle3, as_documented),
    "eagle3-heads": case(eagle3, without_logits),
    "signatures": signatures,
}

if __name__ == "__main__":
    main(CASES)
