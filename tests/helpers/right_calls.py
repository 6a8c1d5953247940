"""Functions and constructors that check their arguments, and a right call of each."""

from types import SimpleNamespace
from unittest import mock

import torch
from energy_statistic import Energy
from lines import MASK, B, S, right

import tp_headloss as hl
from tp_headloss.integrations import ms_swift, nemo_rl, skyrl, slime, specforge, speculators
from tp_headloss.integrations.verl import functions

LOGITS, IDS, HIDDEN, WEIGHT = (
    torch.zeros(B, S, 8),
    torch.zeros(B, S).long(),
    torch.zeros(B, S, 6),
    torch.zeros(8, 6),
)
BOUNDS = {"vocab_start_index": 0, "vocab_end_index": 8}
NEXT = BOUNDS | {"target": IDS, "tp_group": None}
PACKED = {"cu_seqlens_padded": torch.tensor([0, S]), "unpacked_seqlen": S}
NEXT_PACKED = BOUNDS | PACKED | {"target": IDS[:1], "group": None}
ACTIONS = PACKED | {
    "num_actions": 1,
    "attention_mask": MASK[:1],
    "loss_mask": None,
    "cp_group": None,
    "tp_group": None,
}
DRAFT = {"student_logits": LOGITS, "teacher_logits": LOGITS, "mask": MASK.float()}
DRAFT_LOSS = {"logits": LOGITS, "targets": LOGITS}
PROBABILITIES = {"target_p": LOGITS.softmax(-1), "target_p_on_draft": LOGITS.softmax(-1) / 2}
POSITIONS = {"position_mask": MASK[..., None]}
LK = {"lk_loss_type": "lambda", "kl_scale": 1.0, "kl_decay": 1.0}
SPECFORGE_MODEL = SimpleNamespace(draft_model=SimpleNamespace(d2t=torch.zeros(8).long()), **LK)
REDUCTIONS = SimpleNamespace(
    reduce_metrics=lambda local_correct, local_denom: (local_correct, local_denom),
    reduce_loss=lambda loss: loss,
)
STATES = {"hidden": HIDDEN, "lm_head_weight": WEIGHT}
TEACHER_OUTPUT = SimpleNamespace(
    full_logits=LOGITS, topk_logprobs=None, topk_indices=None, labels=None
)
OWN_PART = hl.Linear(hidden_grad="none")
FULL_TEACHER = SimpleNamespace(teacher_payload="logits", chunk_size=2, validate_decomposition=True)
DISTILLED = {
    "data": {"input_ids": IDS, "teacher_full_logits": LOGITS},
    "loss_fn": SimpleNamespace(opd_full=FULL_TEACHER),
}
HOSTS = {  # functions of hosts, whose arguments go together: a right call of each
    nemo_rl.get_next_token_logprobs_from_logits: {"input_ids": IDS, "next_token_logits": LOGITS},
    nemo_rl.from_parallel_logits_to_logprobs: NEXT | {"vocab_parallel_logits": LOGITS},
    nemo_rl.from_parallel_logits_to_logprobs_packed_sequences: NEXT_PACKED | {"vocab_parallel_logits": LOGITS[:1]},
    nemo_rl.from_parallel_hidden_states_to_logprobs: NEXT
    | {"tensor_parallel_hidden_states": HIDDEN.transpose(0, 1), "output_weight_layer": WEIGHT}
    | {"runtime_gather_output": None, "linear": OWN_PART},
    nemo_rl.get_distillation_topk_logprobs_from_logits: {
        "student_logits": LOGITS, "teacher_topk_logits": torch.zeros(B, S, 2), "zero_outside_topk": True,
        "teacher_topk_indices": torch.zeros(B, S, 2).long(), "calculate_entropy": True,
    },
    nemo_rl.prepare_opd_full_loss_input: DISTILLED | {"logits": LOGITS},
    nemo_rl.prepare_opd_full_loss_input_from_hidden_states: DISTILLED
    | {"tensor_parallel_hidden_states": HIDDEN.transpose(0, 1), "output_weight_layer": WEIGHT}
    | {"linear": OWN_PART},
    skyrl.from_parallel_logits_to_logprobs_packed_sequences: NEXT_PACKED | {"vocab_parallel_logits": LOGITS[:1]},
    skyrl.from_parallel_hidden_to_logprobs: NEXT | STATES,
    skyrl.from_parallel_hidden_to_logprobs_packed_sequences: NEXT_PACKED | STATES | {"hidden": HIDDEN[:1]},
    skyrl.vocab_parallel_entropy_packed_sequences: ACTIONS | {"vocab_parallel_logits": LOGITS[:1]},
    skyrl.from_parallel_hidden_to_entropy_packed_sequences: ACTIONS | STATES | {"hidden": HIDDEN[:1]},
    skyrl.draft_soft_ce: DRAFT,
    skyrl.draft_soft_ce_topk: DRAFT | {"k": 2},
    **{
        getattr(speculators, name): DRAFT_LOSS
        for name in speculators.__all__ if name.endswith("_loss")
    },
    speculators.compute_metrics: {"logits": LOGITS, "targets": LOGITS, "loss_mask": MASK, "prev_correct": MASK.clone(),
                                  "ttt_step": 1, "ttt_step_loss_decay": 0.8},
    specforge.compute_acceptance_rate: POSITIONS | {"logits": LOGITS, "target_probs": LOGITS.softmax(-1) / 2},
    specforge.compute_loss_and_acceptance_rate: PROBABILITIES | POSITIONS | LK | {"logits": LOGITS},
    specforge.acc_and_loss: PROBABILITIES | POSITIONS | {
        "model": SPECFORGE_MODEL, "logits": LOGITS, "target_token_ids": IDS, "loss_mask": MASK[..., None],
        "adapter": REDUCTIONS,
    },
    specforge.compute_target_p_padded_from_hidden: {
        "hidden": HIDDEN, "lm_head_weight": WEIGHT, "t2d": torch.arange(8) < 4, "loss_mask": MASK[..., None],
        "length": 1,
    },
    slime.calculate_log_probs_and_entropy: {"logits": LOGITS[0], "tokens": IDS[0], "tp_group": None},
    ms_swift.compute_logps_and_entropy_from_logits: {"logits": LOGITS, "labels": IDS, "tp_group": None},
    ms_swift.vocab_parallel_topk: {"logits": LOGITS, "k": 2, "tp_group": None},
    ms_swift.gkd_loss: {"student_logits": LOGITS, "teacher_output": TEACHER_OUTPUT, "labels": IDS, "beta": 0.5}
    | {"temperature": 1.0, "tp_group": None},
    functions.logits_processor: {"group": None, "vocab_size": 8},
    functions.linear_cross_entropy: {"hidden": HIDDEN, "weight": WEIGHT, "labels": IDS},
}  # fmt: skip


def of_terms(**keywords):
    """`HeadLoss.forward` with two inputs."""
    return hl.HeadLoss([hl.PolicyGradient("clip")])(**keywords)


def of_terms_from_hidden_states(**keywords):
    """`HeadLoss.linear` with two inputs."""
    return hl.HeadLoss([hl.PolicyGradient("clip")]).linear(**keywords)


def of_a_family(**keywords):
    """`register_statistic`, forgotten afterwards."""
    with mock.patch.object(hl.statistics, "FAMILIES", hl.statistics.FAMILIES):
        hl.register_statistic(**keywords)


INPUTS = {"inputs": {"advantages": torch.ones(B, S), "old_log_prob": torch.zeros(B, S)}}
CALL, LINEAR_CALL = (
    {"logits": LOGITS, "labels": IDS},
    {"hidden": HIDDEN, "weight": WEIGHT, "labels": IDS},
)
ALL = {"sets": hl.IdSets(IDS[..., None]), "ids": IDS[..., None], "total_weight": torch.ones(8)}
ALL |= {
    "want": ("total", "set_log_prob", "log_probs_at", "topk_forward_kl"),
    "teacher": hl.TopKTeacher(IDS[..., None], -HIDDEN[..., :1]),
}
SHARD = hl.VocabShard(0, 8, 8)
CORE = {
    hl.HeadLoss: {}, hl.CausalLMLoss: {"head_loss": hl.HeadLoss()},
    hl.VocabParallelHead: {"hidden_size": 6, "shard": SHARD},
    hl.VocabParallelEmbedding: {"hidden_size": 6, "shard": SHARD}, hl.vocab_statistics: CALL | ALL, hl.log_probs: CALL,
    hl.linear_vocab_statistics: LINEAR_CALL | ALL | {"bias": torch.zeros(8)},
    hl.topk_log_probs: {"logits": HIDDEN, "weight": WEIGHT, "k": 2, "top_p": 0.5},
    hl.kept_ids: {"logits": HIDDEN, "weight": WEIGHT, "rule": hl.SamplingRule(2)}, of_a_family: {"family": Energy()},
    hl.sample: {"logits": HIDDEN, "weight": WEIGHT, "seed": 1, "positions": IDS},
    of_terms: CALL | INPUTS | {"token_weight": torch.ones(B, S), "denominator": torch.tensor(2.0)},
    of_terms_from_hidden_states: LINEAR_CALL | INPUTS | {"token_weight": torch.ones(B, S), "bias": torch.zeros(8)},
}  # fmt: skip
HEAD, EMBEDDING = hl.VocabParallelHead(6, SHARD), hl.VocabParallelEmbedding(6, SHARD)
CORE |= {
    HEAD.forward: {"hidden": HIDDEN, "labels": IDS},
    HEAD.statistics: {"hidden": HIDDEN, "labels": IDS, "want": ("entropy",)},
    HEAD.logits: {"hidden": HIDDEN},
    EMBEDDING.forward: {"ids": IDS},
}
CONSTRUCTORS = {
    hl.Term: {"name": "own", "function": len, "want": ("total",), "class_weight": torch.ones(8)},
    hl.VocabShard: {"start": 0, "stop": 8, "vocab_size": 8},
    hl.VocabShard.from_group: {"group": None, "vocab_size": 8},
    hl.VocabShard.from_boundaries: {"boundaries": [0, 8], "vocab_size": 8},
    hl.Sequences.from_mask: {"mask": MASK},
    hl.Sequences.from_cu_seqlens: {"cu_seqlens": torch.tensor([0, B * S]), "mask": MASK},
    hl.Sequences.from_ids: {"ids": IDS, "count": 1, "mask": MASK},
    hl.multi_token_targets: {"labels": IDS, "depths": 2, "cu_seqlens": torch.tensor([0, B * S])},
    hl.IdSets.from_csr: {"ids": IDS[0], "offsets": torch.tensor([0, S])},
    hl.select_rows: {"weight": WEIGHT, "ids": torch.tensor([1, 2]), "shard": SHARD},
    hl.reduce_metrics: {"metrics": {"count": torch.ones(())}, "group": None},
    hl.mean_metrics: {"outputs": hl.HeadLoss()(LOGITS, IDS)},
    hl.combine_metrics: {"parts": [{"count": torch.ones(())}]},
    hl.clip_grad_norm_: {"parameters": [torch.nn.Parameter(torch.ones(2))], "max_norm": 1.0},
    **{preset: {} for preset in (hl.PPO, hl.GRPO, hl.DAPO, hl.DrGRPO, hl.GSPO, hl.CISPO)},
}


def sequences_of(**keywords):
    """`Sequences`, of all arguments of its constructor."""
    return hl.Sequences(**keywords)


ORDERED = {
    "ids": torch.zeros(B, S).long(),
    "order": torch.arange(B * S),
    "offsets": torch.tensor([0, B * S]),
}
CONSTRUCTORS |= {
    hl.IdSets.cat: {"parts": [hl.IdSets(IDS)], "dim": 0},
    hl.IdSets.stack: {"parts": [hl.IdSets(IDS)], "dim": 0},
    hl.Sequences.from_mask(MASK, horizon=3).aggregate: {"reduction": "seq-mean-token-sum-norm"},
    sequences_of: {
        "mask": MASK,
        **ORDERED,
        "bounds": ORDERED["offsets"],
        "lengths": torch.tensor([6.0]),
        "group": None,
    },
}
CORE |= CONSTRUCTORS
MEANT = {  # functions that call another one -> that one
    sequences_of: hl.Sequences.__init__,
    of_terms: hl.HeadLoss.forward,
    of_terms_from_hidden_states: hl.HeadLoss.linear,
    of_a_family: hl.register_statistic,
}
for caller, meant in MEANT.items():
    caller.lines = meant.lines
HOSTS |= CORE
CHECKED = {
    name: f
    for name, f in {**vars(hl.losses), **vars(hl)}.items()
    if callable(f) and hasattr(f, "lines")
}
del CHECKED["register_statistic"]  # of which all later tests would know
CHECKED |= {
    f"{f.__module__.rsplit('.')[-1]}.{f.__name__}": f for f in HOSTS if f not in CHECKED.values()
}


def arguments_of(function) -> dict:
    """Arguments that a function takes; of a loss or an option all of them."""
    if function in HOSTS:
        return HOSTS[function]
    given = {name: right(name, line) for name, line in function.lines.items()}
    if function is hl.TopKDistillation:  # the only one of which outside_log_prob is
        given |= {"divergence": "reverse_kl", "support": "vocabulary"}
    if function in (hl.losses.icepop, hl.losses.truncated_importance_weight):
        del given["sequences"]  # of the other level
    return given | ({"objective": "vespo"} if "objective" in given else {})
