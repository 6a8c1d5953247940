"""verl's Megatron engine with this package's head against the same engine with verl's own, on two
gloo ranks.

Real are verl's engine, its registry, its configuration classes, its micro-batches, packing, context
parallelism, losses of PPO and of distillation, and Megatron-Core's GPTModel, schedule,
data-parallel wrapper and optimizer. Not real: ray, which only starts verl's processes, is an empty
module; the bridge that makes a Megatron model of a checkpoint needs Transformer Engine, so
`build_module` makes the model; the core attention is torch's, for packed sequences.
"""
# ruff: noqa: E402, as nothing of Megatron or verl may be imported before it runs on CPUs

import contextlib
import functools
import os
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

os.environ |= {
    "VERL_ENGINE_DEVICE": "cuda",
    "TORCHDYNAMO_DISABLE": "1",
    "VERL_LOGGING_LEVEL": "ERROR",
}

import numpy as np
import torch
from cases import (
    ROOT,
    compared,
    fails_cleanly_at_every_step,
    main,
    refused,
    refuses_what_its_lines_rule_out,
    relative_errors,
)
from pages import marked_block
from torch import nn

sys.path.insert(0, str(ROOT / "launch"))

import megatron_cpu
import without_ray  # noqa: F401

megatron_cpu.pretend()

import verl.workers.engine.megatron.transformer_impl as host
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from preset_cases import CASES as PRESET_CASES
from tensordict import TensorDict
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    DistillationConfig,
    DistillationLossConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
    MtpConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from megatron_model import Norm
from tp_headloss import Linear, Options
from tp_headloss.integrations.verl import engine as engine_module
from tp_headloss.integrations.verl import heads
from tp_headloss.integrations.verl.engine import HeadLossEngine, install

V, H, K = 256, 32, 16
PROMPTS, RESPONSES = (3, 2, 4, 3), (5, 7, 2, 6)


class Attention(nn.Module):
    """Causal core attention within each packed sequence; under context parallelism a token sees
    itself alone."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **kwargs):
        super().__init__()

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **kwargs):
        packed = packed_seq_params is not None
        if parallel_state.get_context_parallel_world_size() > 1:
            return value.flatten(1) if packed else value.flatten(2)
        # [s, b, heads/P, d]
        q, k, v = (x.unsqueeze(1) if packed else x for x in (query, key, value))
        position = torch.arange(len(q))
        mask = position[:, None] >= position
        if packed:
            sequence = torch.bucketize(
                position, packed_seq_params.cu_seqlens_q_padded[1:].long(), right=True
            )
            mask = mask & (sequence[:, None] == sequence)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).permute(
            2, 0, 1, 3
        )
        return mixed.flatten(1) if packed else mixed.flatten(2)


def build_config(self):
    """In the place of what verl reads from a checkpoint by its bridge."""
    bf16 = bool(self.engine_config.override_transformer_config.get("bf16"))
    self.is_value_model = False
    self.share_embeddings_and_output_weights = self.model_config.share_embeddings_and_output_weights
    self.param_dtype = self.dtype = torch.bfloat16 if bf16 else torch.float32
    self.vanilla_bridge = self.bridge = self.provider = self.peft_cls = None
    self.tf_config = TransformerConfig(
        num_layers=self.engine_config.pipeline_model_parallel_size, hidden_size=H, num_attention_heads=2,
        use_cpu_initialization=True, init_method_std=0.3, batch_p2p_sync=False, variable_seq_lengths=True,
        tensor_model_parallel_size=self.engine_config.tensor_model_parallel_size,
        pipeline_model_parallel_size=self.engine_config.pipeline_model_parallel_size,
        moe_token_dispatcher_type="alltoall", context_parallel_size=self.engine_config.context_parallel_size,
        sequence_parallel=self.engine_config.sequence_parallel, hidden_dropout=0.0, attention_dropout=0.0, bf16=bf16,
        params_dtype=self.param_dtype, pipeline_dtype=self.param_dtype, add_bias_linear=False,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
        bias_activation_fusion=False,
    )  # fmt: skip


def build_module(self):
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Attention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    torch.manual_seed(7)
    model = GPTModel(
        config=self.tf_config, transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[spec], layer_norm=Norm),
        vocab_size=V, max_sequence_length=32, parallel_output=True, position_embedding_type="none",
        share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    model = Float16Module(self.tf_config, model) if self.tf_config.bf16 else model
    return [
        DistributedDataParallel(
            self.tf_config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
    ]


host.MegatronEngine._build_tf_config, host.MegatronEngine._build_megatron_module = (
    build_config,
    build_module,
)
host.MegatronCheckpointManager = mock.MagicMock()  # asks for a checkpoint
host.log_gpu_memory_usage = lambda *args, **kwargs: None


def model_config(tied=False, **config):
    """verl's configuration of a model, of a folder with its config.json alone."""
    import tempfile

    from transformers import LlamaConfig

    folder = tempfile.mkdtemp()
    LlamaConfig(
        vocab_size=V, hidden_size=H, num_hidden_layers=1, num_attention_heads=2, intermediate_size=4 * H,
        tie_word_embeddings=tied, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    found = HFModelConfig(
        path=folder,
        load_tokenizer=False,
        override_config={"attn_implementation": "eager"},
        **config,
    )
    found.tokenizer = SimpleNamespace(pad_token_id=0)
    return found


def engine_of(
    fused=False,
    tied=False,
    cp=1,
    pp=1,
    sp=False,
    remove_padding=True,
    bf16=False,
    initialize=True,
    **config,
):
    """The engine that is registered, of two ranks that share the vocabulary, or (cp=2) the
    sequences, or (pp=2) have a pipeline stage each."""
    if parallel_state.is_initialized() and layout() != (cp, pp):
        parallel_state.destroy_model_parallel()
    sizes = {
        "tensor_model_parallel_size": 2 // (cp * pp),
        "context_parallel_size": cp,
        "sequence_parallel": sp,
    }
    sizes["pipeline_model_parallel_size"] = pp
    engine = EngineRegistry.new(
        "language_model", "megatron", model_config=model_config(tied), checkpoint_config=None,
        engine_config=McoreEngineConfig(
            use_distributed_optimizer=False, use_fused_kernels=fused, use_remove_padding=remove_padding,
            override_transformer_config={"bf16": bf16}, forward_only=bf16, **sizes, **config,
        ),
        optimizer_config=McoreOptimizerConfig(
            optimizer="sgd", lr=2.0**-4, clip_grad=0.0, weight_decay=0.0, total_training_steps=8,
            lr_decay_style="constant",
        ),
    )  # fmt: skip
    if initialize:
        engine.initialize()
    return engine


def layout():
    sizes = (
        parallel_state.get_context_parallel_world_size,
        parallel_state.get_pipeline_model_parallel_world_size,
    )
    return tuple(size() for size in sizes)


def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def batch(**flags):
    """Rollouts of two prompts, two answers each, as verl's trainer hands them to an engine."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(1, V, (p + r,), generator=generator) for p, r in zip(PROMPTS, RESPONSES)]
    responses = [x[p:] for x, p in zip(ids, PROMPTS)]
    masks = nested(torch.ones(r, dtype=torch.int64) for r in RESPONSES)
    teacher = [torch.randn(len(x), V, generator=generator).log_softmax(-1).topk(K) for x in ids]
    fields = {
        "input_ids": nested(ids), "prompts": nested(x[:p] for x, p in zip(ids, PROMPTS)),
        "responses": nested(responses), "loss_mask": masks, "response_mask": masks,
        "temperature": torch.tensor([1.0, 0.7, 1.3, 1.0]),  # of each sample
        "teacher_ids": nested(x.indices for x in teacher), "teacher_logprobs": nested(x.values for x in teacher),
    }  # fmt: skip
    data = TensorDict(fields, batch_size=[4])
    facts = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "global_batch_size": 4,
        "calculate_entropy": True,
    }
    tu.assign_non_tensor(data, **facts, **flags)
    return data


def actor(**config):
    return ActorConfig(
        strategy="megatron",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=2,
        entropy_coeff=0.01,
        **config,
    )


def grpo_inputs(engine, data):
    """Old log-probs of the engine, a reference that differs from them, and GRPO's advantages of two
    groups, by verl."""
    with engine.eval_mode():
        # none of a pipeline stage but the last
        out = engine.infer_batch(data.clone()).get("model_output", {})
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(r) for r in RESPONSES], batch_first=True)
    rewards = torch.zeros_like(mask)
    rewards[:, 0] = torch.tensor([1.0, 0.0, 0.5, 2.0])
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, mask, index=np.array(["a", "a", "b", "b"])
    )
    old = no_padding_2_padding(out["log_probs"], data).detach() if out else torch.zeros_like(mask)
    for name, x in {
        "old_log_probs": old,
        "ref_log_prob": old + 0.1 * old.sin(),
        "advantages": advantages,
    }.items():
        data[name] = nested(row[:r] for row, r in zip(x, RESPONSES))
    return out


def trajectory(steps=3, distills=None, only=False, clamp=None, **kind):
    """Steps of the registered engine: the losses, model outputs, last gradients and last weights,
    each by name."""
    engine = engine_of(**kind)
    assert getattr(engine, "fuses_head", False) == kind.get("fused", False)
    data, flags = batch(), {"calculate_sum_pi_squared": not distills}
    if distills:
        flags |= {"distillation_use_topk": True, "distillation_only": only}
    outputs = {f"old {name}": x.values() for name, x in grpo_inputs(engine, data).items()}
    tu.assign_non_tensor(data, **flags, calculate_entropy=not only)
    loss_function = partial(ppo_loss, actor(use_kl_loss=True))
    if distills:
        settings = {
            "use_policy_gradient": False,
            "use_task_rewards": not only,
            "log_prob_min_clamp": clamp,
        }
        settings = DistillationLossConfig(loss_mode="forward_kl_topk", topk=K, **settings)
        settings = DistillationConfig(distillation_loss=settings)
        loss_function = partial(
            distillation_ppo_loss, config=actor(use_kl_loss=True), distillation_config=settings
        )
    grads, stock_step = {}, engine.optimizer_step

    def optimizer_step():
        grads.update({name: p.main_grad.clone() for name, p in engine.module[0].named_parameters()})
        return stock_step()

    engine.optimizer_step = optimizer_step
    with engine.train_mode():
        for step in range(steps):
            out = engine.train_batch(data.clone(), loss_function)
            outputs |= {
                f"{name} of step {step}": x.values()
                for name, x in out.get("model_output", {}).items()
            }
            outputs[f"loss of step {step}"] = torch.tensor(out.get("loss", 1.0))
    weights = {name: p.detach().clone() for name, p in engine.module[0].named_parameters()}
    return outputs, grads, weights


@functools.cache
def verls_own(**kind):
    return trajectory(**kind)


def same(group, fused=False, response_only=False, **kind):
    """A short GRPO step of the actor, or a distillation, with the head and with verl's own ->
    `compared`."""
    theirs = verls_own(**kind)
    no_logits = (
        mock.patch.object(engine_module, "LogitsHead", None) if fused else contextlib.nullcontext()
    )
    compute = mock.patch.object(
        heads, "linear_vocab_statistics", wraps=heads.linear_vocab_statistics
    )
    agree = mock.patch.object(heads, "agreed_count", wraps=heads.agreed_count)
    head = install(response_only=response_only)
    with head as installed, no_logits, compute as computed, agree as agreed:
        ours = trajectory(fused=fused, **kind)
    left_out = [
        call
        for call in computed.call_args_list
        if call.kwargs["linear"].max_valid_tokens is not None
    ]
    assert len(left_out) == (installed.calls if fused and response_only else 0)
    assert agreed.call_count == len(left_out)  # ranks with other labels are an error
    if response_only:  # verl's of the other tokens as 0, which they are
        scored = torch.cat(
            [torch.arange(1, p + r + 1) % (p + r) >= p for p, r in zip(PROMPTS, RESPONSES)]
        )
        outputs = {
            name: x if name.startswith("loss") else x * scored for name, x in theirs[0].items()
        }
        theirs = outputs, *theirs[1:]
    last = parallel_state.is_pipeline_last_stage()
    # micro-batches, and none of the check call
    assert installed.calls == last * (2 + 2 * kind.get("steps", 3))
    head = next(
        name for name in ours[1] if name.endswith(("output_layer.weight", "word_embeddings.weight"))
    )
    errors = relative_errors(
        {n: x.float() for n, x in ours[0].items()}, {n: x.float() for n, x in theirs[0].items()}
    )
    grads, weights = (relative_errors(mine, host) for mine, host in zip(ours[1:], theirs[1:]))
    found = compared(torch.zeros(1), ours[1], torch.ones(1), theirs[1], head)
    found |= {
        "loss": max(errors.values()),
        "grads": max(grads.values()),
        "weights": max(weights.values()),
    }
    return found | {"outputs": len(errors), "changed": bool(theirs[0]["loss of step 0"].norm() > 0)}


def half_precision(group):
    """bf16, whose wrapper makes fp32 logits of bf16 ones: as close to the same in fp32 as verl's
    own is."""

    def scored(**kind):
        engine = engine_of(**kind)
        with engine.eval_mode():
            return engine.infer_batch(batch(calculate_sum_pi_squared=True))["model_output"]

    theirs = scored(bf16=True)
    with install():
        ours, fused = scored(bf16=True), scored(bf16=True, fused=True)
    exact = scored()
    error = {name: max(relative_errors(values(x), values(exact)).values()) for name, x in
             {"theirs": theirs, "logits": ours, "fused": fused}.items()}  # fmt: skip
    return error | {
        "fp32": all(x.dtype == torch.float32 for out in (ours, fused) for x in values(out).values())
    }


def values(outputs):
    return {name: x.values() for name, x in outputs.items()}


def padded_vocabulary(group):
    """With a vocab_size the softmax is over these ids alone."""
    with install(vocab_size=V - 3, options=Options(inplace=True)):
        engines = [engine_of(fused=fused) for fused in (False, True)]
        outputs = []
        for engine in engines:
            data = batch()
            data["input_ids"] = nested(x % (V - 3) for x in data["input_ids"].unbind())
            with engine.eval_mode():
                outputs.append(values(engine.infer_batch(data)["model_output"]))
    logits = torch.randn(1, 6, V // 2)
    label, temperature = torch.full((1, 6), 3), torch.ones(1, 6)
    whole = [torch.empty_like(logits) for _ in range(2)]
    torch.distributed.all_gather(whole, logits)
    wanted = (
        "calculate_sum_pi_squared",
        "calculate_entropy",
        "distillation_use_topk",
        "distillation_only",
    )
    wanted = {
        **dict.fromkeys(wanted, False),
        "logits_processor_func": None,
        "batch": None,
        "data_format": "thd",
    }
    found = engines[0]._lm_head_logits_processor(logits, label, temperature, **wanted)["log_probs"]
    expected = torch.cat(whole, -1)[..., : V - 3].log_softmax(-1)[..., 3]
    return {
        "log_probs": float((found - expected).abs().max()),
        "fused": max(relative_errors(*outputs).values()),
    }


def external_lib(group):
    """The one line of a user's configuration."""
    before = registered()
    config = model_config(external_lib="tp_headloss.integrations.verl.external_lib")
    from tp_headloss.integrations.verl.external_lib import installed

    engine = engine_of(initialize=False)
    assert isinstance(engine, HeadLossEngine) and type(engine) is installed.engine_class, type(
        engine
    )
    installed.remove()
    return {"removed": registered() == before, "line": config.external_lib.endswith("external_lib")}


def registered():
    return dict(EngineRegistry._engines["language_model"]["megatron"])


def run_nothing():
    with install():
        pass


def refusals(group):
    before = registered()
    with install() as installed:
        engine = engine_of(fused=True)
        with engine.eval_mode():
            engine.infer_batch(batch())
        refused(
            install, "must be registered for 'megatron', got {'cuda': 'HeadLossEngine'", Exception
        )
        data = batch(distillation_use_topk=True, distillation_only=False)
        with engine.eval_mode(), torch.no_grad():
            loss = partial(ppo_loss, actor())
            other = partial(engine.forward_backward_batch, data, loss, forward_only=True)
            refused(other, "got ppo_loss: remove the head", Exception)
        assert engine._taken is None and "forward" not in vars(engine.module[0].module.output_layer)
        fsdp = partial(engine_of, fused=True, use_megatron_fsdp=True)
        refused(fsdp, "got use_megatron_fsdp=True", Exception)
        engine = engine_of(fused=True, initialize=False)
        engine.model_config.mtp, engine.module = MtpConfig(enable=True), []
        engine._build_tf_config()
        engine._maybe_enable_fused_kernels()
        assert not engine.fuses_head and not engine.engine_config.use_fused_kernels
    refused(run_nothing, "the head has computed nothing", Exception)
    refused(lambda: install(linear=Linear("one_sweep")), "mode='recompute' or 'auto'")
    refuses_what_its_lines_rule_out(install)
    signature = lambda self, logits, label: None  # noqa: E731
    with mock.patch.object(host.MegatronEngineWithLMHead, "_lm_head_logits_processor", signature):
        refused(install, "got ('self', 'logits', 'label')", Exception)
    with install() as installed:
        installed.place["cuda"] = host.MegatronEngineWithValueHead
        refused(installed.remove, "must be the one that this installed, got verl.", Exception)
        installed.place["cuda"] = installed.engine_class
        installed.engine_class.calls = 1
    with install(options=Options(backend="torch")) as installed:
        processor = HeadLossEngine._lm_head_logits_processor

        def wrong(self, *args, **kwargs):
            return {name: 1.5 * x for name, x in processor(self, *args, **kwargs).items()}

        installed.engine_class._lm_head_logits_processor = wrong
        refused(
            engine_of, "sum_pi_squared of the check call differs from the host's own by", Exception
        )
        installed.engine_class.calls = 1
    view = SimpleNamespace(
        modules=lambda: [SimpleNamespace(**registered(), _forward_hooks=(), _forward_pre_hooks=())]
    )
    assert fails_cleanly_at_every_step(install, view) >= 10 and registered() == before
    return {}


def documented(group):
    found = {
        "batch": batch(),
        "model_config": model_config(),
        "engine_of": engine_of,
        "torch": torch,
    }
    exec(compile(marked_block("host", "verl"), "docs", "exec"), found)
    return {"calls": found["installed"].calls, "entropy": float(found["entropy"].values().min())}


CASES = {
    f"{name}, {'fused' if fused else 'logits'}": partial(same, fused=fused, **kind)
    for name, kind in {
        "grpo": {},
        "grpo, tied": {"tied": True},
        "grpo, sequence parallel": {"sp": True},
        "grpo, with padding": {"remove_padding": False},
        "distillation and grpo": {"distills": True, "steps": 1},
        "distillation, clamped": {"distills": True, "only": True, "clamp": -6.0, "steps": 1},
        "distillation, sequence parallel": {"distills": True, "only": True, "sp": True, "steps": 1},
        "distillation, with padding": {"distills": True, "remove_padding": False, "steps": 1},
        "grpo, responses": {"response_only": True},
        "grpo, responses, sequence parallel": {"response_only": True, "sp": True},
        "grpo, responses, with padding": {"response_only": True, "remove_padding": False},
        # the last: another division of the ranks
        "grpo, context parallel": {"cp": 2},
        "distillation, context parallel": {"distills": True, "cp": 2, "steps": 1},
        "grpo, responses, context parallel": {"response_only": True, "cp": 2},
        "grpo, pipeline": {"pp": 2},
        "distillation, pipeline": {"distills": True, "pp": 2, "steps": 1},
    }.items()
    for fused in (False, True)
} | {
    "half precision": half_precision,
    "padded vocabulary": padded_vocabulary,
    "external_lib": external_lib,
    "refusals": refusals,
    "documented": documented,
    **PRESET_CASES,
}

if __name__ == "__main__":
    main(CASES)
