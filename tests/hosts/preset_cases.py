"""`GRPO`, `DAPO` and the other presets on two shards of the vocabulary against the host's own loss
of the same batch, and the gradient of the logits: verl's functions in its environment, TRL's
trainer in the other.

Cases of verl_cases.py and of trainer_cases.py, which have imported these hosts: that takes longer
than all cases here."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from functools import partial
from types import MethodType, SimpleNamespace

import torch
from pages import ROOT, names_of

import tp_headloss
from tp_headloss import HeadLoss, Sequences, Term, VocabShard

if importlib.util.find_spec("verl"):
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig, PolicyLossConfig
else:
    core_algos = None
    from trl import GRPOTrainer

B, S, V, HORIZON, KL = 6, 9, 64, 9, 0.02
CLIP = (0.1, 0.15)
# preset -> its settings, as ours takes them; verl's function and aggregation; TRL's loss_type and
# level
PRESETS = {
    "PPO": ({"clip": CLIP, "dual_clip": 1.4}, ("vanilla", "token-mean"), None),
    "GRPO": ({"clip": CLIP}, ("vanilla", "seq-mean-token-mean"), ("grpo", "token")),
    "DAPO": ({"clip": CLIP}, ("vanilla", "token-mean"), ("dapo", "token")),
    "DrGRPO": ({"clip": CLIP}, ("vanilla", "seq-mean-token-sum-norm"), ("dr_grpo", "token")),
    "GSPO": ({"clip": CLIP}, ("gspo", "seq-mean-token-mean"), ("grpo", "sequence")),
    "CISPO": ({"clip": CLIP}, ("cispo", "token-mean"), ("cispo", "token")),
}


def batch(seed):
    """Logits [B, S, V], labels of which some are ignored, and the inputs of a policy loss."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, S, V, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[torch.arange(S) >= torch.tensor([9, 4, 7, 1, 9, 6])[:, None]] = -100
    log_prob = x.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    noise = torch.randn(2, B, S, generator=generator, dtype=torch.float64)
    advantages = torch.randn(B, 1, generator=generator, dtype=torch.float64)
    return x, labels, advantages, log_prob + 0.3 * noise[0], log_prob + 0.5 * noise[1]


def verls(preset, log_prob, mask, advantages, old, reference):
    settings, (name, mode), _ = PRESETS[preset]
    low, high = settings["clip"]
    config = ActorConfig(
        strategy="fsdp", clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, use_dynamic_bsz=True,
        clip_ratio_c=settings.get("dual_clip", 1e9), rollout_n=1,
    )  # fmt: skip
    given = old, log_prob, advantages.expand(B, S), mask
    loss, _ = core_algos.get_policy_loss_fn(name)(*given, loss_agg_mode=mode, config=config)
    kl = core_algos.kl_penalty(log_prob, reference, "low_var_kl")
    return loss + KL * core_algos.agg_loss(kl, mask, mode)


def trls(preset, log_prob, mask, advantages, old, reference):
    settings, _, (kind, level) = PRESETS[preset]
    low, high = settings["clip"]
    high = 1 + high if kind == "cispo" else high
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    arguments = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_prob, log_prob.detach(), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=KL, args=arguments,
        importance_sampling_level=level, epsilon_low=low, epsilon_high=high, loss_type=kind, use_vllm=False,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, accelerator=accelerator,
        max_completion_length=HORIZON, _entropy_bonus_enabled=False, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    ids, tokens = torch.zeros(B, S, dtype=torch.int64), mask.sum()
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask,
        "advantages": advantages[:, 0], "old_per_token_logps": old, "ref_per_token_logps": reference,
        "num_items_in_batch": tokens,
    }  # fmt: skip
    return MethodType(GRPOTrainer._compute_loss, trainer)(None, inputs)


def add_errors(found, out, loss, part, gradient):
    """Keep the largest relative errors of loss and gradient of this rank's columns."""
    error = abs(float(out) - float(loss)) / abs(float(loss))
    found["loss"] = max(found["loss"], error)
    error = (part.grad - gradient).norm() / gradient.norm()
    found["gradient"] = max(found["gradient"], float(error))


def compared(group, preset, theirs):
    """Largest relative errors of loss and gradient over some batches; "mutant": that of the loss
    without these settings, the least."""
    settings, found = dict(PRESETS[preset][0]), {"loss": 0.0, "gradient": 0.0, "mutant": 1.0}
    if preset == "CISPO" and core_algos is None:
        settings |= {"clip": (0.0, 1 + CLIP[1]), "convention": "bound"}
    ours, mutant = (getattr(tp_headloss, preset)(**given, kl=KL) for given in (settings, {}))
    shard = VocabShard.from_group(group, V)
    columns = slice(shard.start, shard.stop)
    for seed in range(5):
        x, labels, advantages, old, reference = batch(seed)
        mask = labels != -100
        full = x.clone().requires_grad_()
        log_prob = full.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        loss = theirs(preset, log_prob, mask.double(), advantages, old, reference)
        (gradient,) = torch.autograd.grad(loss, full)
        inputs = {"advantages": advantages, "old_log_prob": old, "reference_log_prob": reference}
        inputs["sequences"] = Sequences.from_mask(mask, horizon=HORIZON)
        part = x[..., columns].clone().requires_grad_()
        out = ours(part, labels, shard=shard, inputs=inputs)
        out.backward()
        other = mutant(part.detach(), labels, shard=shard, inputs=inputs)
        add_errors(found, out, loss, part, gradient[..., columns])
        found["mutant"] = min(found["mutant"], abs(float(other) - float(loss)) / abs(float(loss)))
    return found


def recipe_of_page(group, name):
    """Largest relative errors of loss and gradient of a recipe of the documentation."""
    function = names_of(ROOT / "docs/guides/recipes.md")[name]
    term = Term(name, function, inputs=("advantages", "old_log_prob"), pointwise=True)
    policy_loss = PolicyLossConfig(loss_mode=name, dro_beta=0.05)
    given = {"use_dynamic_bsz": True, "rollout_n": 1, "policy_loss": policy_loss}
    config = ActorConfig(strategy="fsdp", clip_ratio=0.2, clip_ratio_c=20.0, **given)
    shard = VocabShard.from_group(group, V)
    columns = slice(shard.start, shard.stop)
    found = {"loss": 0.0, "gradient": 0.0}
    for seed in range(5):
        x, labels, advantages, *_ = batch(seed)
        mask, at = labels != -100, labels.clamp(min=0)[..., None]
        sure = 8 * torch.rand(B, S, 1, generator=torch.Generator().manual_seed(seed)).double()
        full = x.scatter_add(-1, at, sure).requires_grad_()
        log_prob = full.log_softmax(-1).gather(-1, at)[..., 0]
        old = log_prob.detach().roll(1, 0).clamp(max=-1e-3)
        given = old, log_prob, advantages.expand(B, S), mask.double()
        loss, metrics = core_algos.get_policy_loss_fn(name)(*given, config=config)
        assert name == "dro" or 0 < metrics["actor/pg_clipfrac"] < 1
        (gradient,) = torch.autograd.grad(loss, full)
        part = full.detach()[..., columns].requires_grad_()
        inputs = {"advantages": advantages, "old_log_prob": old}
        out = HeadLoss([term])(part, labels, shard=shard, inputs=inputs)
        out.backward()
        add_errors(found, out, loss, part, gradient[..., columns])
    return found


HOST = trls if core_algos is None else verls
CASES = {
    f"preset {preset}": partial(compared, preset=preset, theirs=HOST)
    for preset, (_, _, trl) in PRESETS.items()
    if HOST is verls or trl is not None
}
if HOST is verls:
    CASES |= {
        f"recipe {name}": partial(recipe_of_page, name=name)
        for name in ("dppo_tv", "dppo_kl", "dro")
    }
