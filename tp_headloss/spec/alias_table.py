"""The table of names elsewhere, a line for each: what `aliases` takes, or says what to write for."""

from typing import NamedTuple

SUM_NORM = "seq-mean-token-sum-norm"
DISTANCES = "PPO, GRPO, DAPO, DrGRPO, GSPO"
PRESETS = f"{DISTANCES}, CISPO"
TEACHERS = "Distillation, TopKDistillation"
LOSSES = "HeadLoss.forward, HeadLoss.linear, VocabParallelHead.forward"
ANY = f"HeadLoss, {LOSSES}"
Z_WEIGHTS = "lse_square_scale, z_loss_weight, z_loss_coeff, z_loss_coef"
HEADS = "VocabParallelHead.forward, VocabParallelHead.statistics"
MASK = "token_weight=mask, labels of -100, or for terms by sequence inputs={'sequences': Sequences.from_mask(mask)}"
SEARCHES = "sample, kept_ids, topk_log_probs"
STATISTICS = "vocab_statistics, linear_vocab_statistics, log_probs"
CALLS = f"HeadLoss.forward, HeadLoss.linear, {STATISTICS}, {SEARCHES}"
BONUSES = "entropy_coeff, entropy_coef"
# which no user writes: a host that calls gives them beside others
HOSTS = ("output_layer",)
HEAD = "MegatronHead"
MASKS = "mask, loss_mask, response_mask, completion_mask"
OF_LABELS = (
    "labels of -100 where the label's own mask is 0, which is shifted as the label is: "
    "labels.masked_fill(F.pad(attention_mask[:, 1:], (0, 1)) == 0, -100)"
)
SETS = "kept_ids, sampling_mask"
SEQUENCE_RATIO = 'PolicyGradient("gspo"), or the whole GSPO(..), for "sequence"'
RECORDS_OF_TEACHERS = "Teacher, TopKTeacher, TeacherHead"
TEMPERATURES = "transform=Transform({}=..), of the call, or of a distillation Teacher(.., {}=..)"


class Alias(NamedTuple):
    """A name of somebody else's.

    In `WRITTEN` it is several names, for which {} stands in what is to be written. A k in a name of
    a metric or statistic is any number, which is written for (k).
    """

    name: str
    whose: str
    # what it names here: "value", "term", "metric", "input", "want", or the functions of which it
    # would be a keyword
    of: str
    ours: str  # the value of the same place, or what to write
    # of values: what to write, if `ours` is no synonym of it; of inputs: what to write where `ours`
    # is needed
    write: str = ""


WRITTEN = (
    Alias("token-mean", "verl", "value", "mean"),
    Alias("token-sum", "verl", "value", "sum"),
    Alias("low_var_kl", "verl", "value", "k3"),
    Alias("kl", "verl", "value", "k1", 'estimator="k1", input_clamp=None'),
    Alias("mse", "verl", "value", "k2", 'estimator="k2", input_clamp=None'),
    Alias("low_var_kl+", "verl", "value", "k3+", '"k3+"'),
    Alias("kl+", "verl", "value", "k1+", 'estimator="k1+", input_clamp=None'),
    Alias("mse+", "verl", "value", "k2", 'estimator="k2", input_clamp=None'),
    Alias("gpg", "verl", "value", "reinforce"),
    Alias(
        "ppo",
        "the paper",
        "value",
        "clip",
        'PolicyGradient("clip", clip=(0.2, 0.2)), or the whole PPO(..)',
    ),
    Alias(
        "vanilla",
        "verl",
        "value",
        "clip",
        'PolicyGradient("clip", dual_clip=3.0), or the whole PPO(..)',
    ),
    Alias("grpo", "TRL, verl", "value", "clip", 'PolicyGradient("clip"), or the whole GRPO(..)'),
    Alias(
        "dapo",
        "TRL, verl",
        "value",
        "clip",
        'PolicyGradient("clip", clip=(0.2, 0.28)), or the whole DAPO(..)',
    ),
    Alias("dr_grpo", "TRL", "value", "clip", 'PolicyGradient("clip"), or the whole DrGRPO(..)'),
    Alias("bnpo", "TRL", "value", "clip", 'PolicyGradient("clip") with reduction="mean"'),
    Alias(
        "geo_mean",
        "verl",
        "value",
        "gmpo",
        'PolicyGradient("gmpo") with reduction="seq-mean-token-mean"',
    ),
    Alias("grpo", "TRL", "value", "seq-mean-token-mean", 'reduction="seq-mean-token-mean"'),
    Alias(
        "dapo", "TRL", "value", "mean", 'reduction="mean" with denominator=, tokens of the batch'
    ),
    Alias("bnpo", "TRL", "value", "mean", 'reduction="mean"'),
    Alias(
        "dr_grpo",
        "TRL",
        "value",
        SUM_NORM,
        f'reduction="{SUM_NORM}" with Sequences.from_mask(.., horizon=L)',
    ),
    Alias("mean_tokens, token_mean", "many", "value", "mean", 'reduction="mean"'),
    Alias(
        "batchmean",
        "torch",
        "value",
        "mean",
        'reduction="mean", per token, or with denominator= of your own',
    ),
    Alias(
        "kl", "torch", "value", "forward_kl", '"forward_kl", of teacher to student, or "reverse_kl"'
    ),
    Alias("js", "Liger", "value", "jsd", '"jsd", whose beta is that of the Teacher'),
    Alias("tvd", "Liger", "value", "total_variation", '"total_variation"'),
    Alias("tv", "speculators", "value", "total_variation"),
    Alias("rkl", "speculators", "value", "reverse_kl"),
    Alias("kl_div", "speculators", "value", "forward_kl"),
    Alias("fkl", "many", "value", "forward_kl", '"forward_kl"'),
    Alias("ce", "many", "value", "cross_entropy", '"cross_entropy"'),
    Alias("jensen_shannon", "many", "value", "jsd", '"jsd"'),
    Alias("tail", "ours", "value", "forward_kl", 'TopKDistillation(.., support="tail")'),
    Alias("nla", "speculators", "value", "alpha"),
    Alias("lk_hybrid", "speculators", "value", "lambda"),
    Alias("true", "many", "value", "full", 'validate="full"'),
    Alias("cross_entropy", "torch", "term", "CrossEntropy()"),
    Alias("z_loss", "Megatron", "term", "ZLoss(1e-4)"),
    Alias("entropy", "verl", "term", "Entropy(0.01)"),
    Alias("kl", "many", "metric", '"forward_kl" to a teacher, or PolicyMetrics(..) of a policy'),
    Alias("kl_div, fkl", "speculators, many", "metric", '"forward_kl"'),
    Alias("rkl", "speculators", "metric", '"reverse_kl"'),
    Alias("tv, tvd", "speculators, Liger", "metric", '"total_variation"'),
    Alias("js, jensen_shannon", "Liger, many", "metric", '"jsd"'),
    Alias("kl", "verl", "term", 'KLToReference(0.001, "k3"), or Distillation() for a teacher'),
    Alias("grpo", "TRL, verl", "term", "GRPO(..), a whole HeadLoss"),
    Alias("forward_kl, reverse_kl, jsd", "ours", "term", 'Distillation(1.0, "{}")'),
    Alias("clip_fraction, policy_metrics", "many", "metric", "PolicyMetrics(..)"),
    Alias("acc", "many", "metric", '"accuracy"'),
    Alias("loss", "many", "metric", 'out.means()["loss"], which every output has'),
    Alias(
        "z_loss",
        "Megatron",
        "metric",
        'a term, ZLoss(1e-4): out.means()["loss/z_loss"] is its mean',
    ),
    Alias("bpb, bits_per_byte", "lm-evaluation-harness", "metric", "BitsPerByte()"),
    Alias("ppl", "many", "metric", '"perplexity"'),
    Alias(
        "argmax",
        "ours",
        "metric",
        '"accuracy", or a Metric with want=("argmax",), whose calls have out.stats.argmax',
    ),
    Alias(
        "log_probs_at",
        "ours",
        "metric",
        'Metric(lambda stats, ids: {"mean_at": stats.log_probs_at.mean(-1)}, ("log_probs_at",), ("ids",))',
    ),
    Alias("acceptance_rate, accept_rate", "SpecForge, speculators", "metric", "AcceptanceRate()"),
    Alias("label_smoothing", "torch", ANY, "HeadLoss(CrossEntropy(label_smoothing=0.1))"),
    Alias("class_weight, smoothing_formula", "ours", ANY, "HeadLoss(CrossEntropy({}=..))"),
    Alias("divergence, temperature_squared", "ours", ANY, "HeadLoss(Distillation({}=..))"),
    Alias("estimator", "ours", ANY, "a term of HeadLoss(..), KLToReference({}=..)"),
    Alias("clip, dual_clip, objective", "ours", ANY, "HeadLoss(PolicyGradient({}=..), ..)"),
    Alias(
        Z_WEIGHTS,
        "flash-attention, Liger, many",
        "HeadLoss, CrossEntropy",
        "a term, ZLoss({})",
    ),
    Alias("size_average, reduce", "torch", "HeadLoss", 'reduction="mean", "sum" or "none"'),
    Alias("z_loss", "Megatron", "HeadLoss, CrossEntropy", "a term, ZLoss(1e-4)"),
    Alias("temperature", "many", PRESETS, "transform=Transform({}=..), of the call"),
    Alias("temperature", "many", f"HeadLoss, {LOSSES}", TEMPERATURES),
    Alias("importance_sampling_level", "TRL", f"PolicyGradient, {PRESETS}", SEQUENCE_RATIO),
    Alias("rollout_weight", "ours", PRESETS, "HeadLoss([PolicyGradient(.., {}=True)])"),
    Alias("over", "ours", PRESETS, "HeadLoss([PolicyGradient(.., {}=..)])"),
    Alias("kl", "ours", "PolicyGradient, HeadLoss", "a term, KLToReference({})"),
    Alias("max_length", "TRL", "Sequences.from_mask", "horizon={}"),
    Alias("ce_weight", "Liger", "CrossEntropy", "class_weight="),
    Alias(
        "alpha", "Hinton", f"HeadLoss, {TEACHERS}", "[CrossEntropy(1 - alpha), Distillation(alpha)]"
    ),
    Alias(
        "temperature, T",
        "many",
        TEACHERS,
        "Teacher(logits, temperature=T), and temperature_squared=True for T^2; the main head as the "
        "teacher of Megatron's depths has T = 1",
    ),
    Alias(
        "temperature, T, student_temperature, teacher_temperature",
        "many",
        "AcceptanceRate, LKLoss",
        "Teacher(logits, temperature=T, student_temperature=T), where both are compared",
    ),
    Alias("T, tau", "Hinton, many", f"{RECORDS_OF_TEACHERS}, Transform", "temperature={}"),
    Alias("probs", "many", "Teacher", "Teacher(probs.log())"),
    Alias("probs", "many", "TopKTeacher", "log_probs={}.log()"),
    Alias(
        "logits",
        "many",
        "TopKTeacher",
        "TopKTeacher(top.ids, top.log_probs), with top = topk_log_probs({}, k)",
    ),
    Alias("mask, tail_log_prob, renormalize", "ours", "TopKDistillation", "TopKTeacher(.., {}=..)"),
    Alias("support, outside_log_prob", "ours", "Distillation", "TopKDistillation(.., {}=..)"),
    Alias("indices", "torch", "TopKTeacher", "ids="),
    Alias("values", "torch", "TopKTeacher", "log_probs="),
    Alias("tail", "many", "TopKTeacher", "tail_log_prob="),
    Alias(
        "lse",
        "ours",
        "TopKTeacher",
        'TopKTeacher(d["ids"], d["log_probs"], ..), of the _asdict() d of what topk_log_probs returned',
    ),
    Alias("beta, student_temperature", "ours", "Distillation", "Teacher(logits, {}=..)"),
    Alias(
        "beta, student_temperature",
        "ours",
        "TopKDistillation",
        "TopKTeacher(ids, log_probs, {}=..)",
    ),
    Alias("beta, student_temperature", "ours", "Transform", "Teacher(logits, {}=..)"),
    Alias("divergence, temperature_squared", "ours", "Teacher, TeacherHead", "Distillation({}=..)"),
    Alias(
        "divergence, support, temperature_squared",
        "ours",
        "TopKTeacher",
        "TopKDistillation({}=..)",
    ),
    Alias(
        "softcap, scale, bias",
        "ours",
        "Teacher",
        "logits that have it already, or TeacherHead(.., transform=Transform({}=..))",
    ),
    Alias("softcap, scale", "ours", "TeacherHead", "transform=Transform({}=..)"),
    Alias("top_k", "many", "topk_log_probs", "k="),
    Alias(
        "temperature",
        "vLLM",
        "SamplingRule",
        "transform=Transform(temperature=..), of sample and kept_ids",
    ),
    Alias("temperature", "many", f"{STATISTICS}, {SEARCHES}", "transform=Transform({}=..)"),
    Alias("softcap", "many", CALLS, "transform=Transform({}=..)"),
    Alias(
        "process_group, group",
        "flash-attention, torch",
        CALLS,
        "shard=VocabShard.from_group({}, vocab_size)",
    ),
    Alias("dim", "torch", CALLS, "logits.movedim({}, -1): the vocabulary is the last dimension"),
    Alias("teacher", "many", f"HeadLoss, {LOSSES}", 'inputs={"teacher": Teacher(..)}'),
    Alias("sequences", "ours", LOSSES, 'inputs={"sequences": Sequences.from_mask(..)}'),
    Alias(
        "cu_seqlens",
        "flash-attention",
        LOSSES,
        "labels of -100 across documents, and for reductions by sequence "
        'inputs={"sequences": Sequences.from_cu_seqlens(..)}',
    ),
    Alias(MASKS, "verl, TRL, Megatron, Transformers", "input", MASK),
    Alias(MASKS, "verl, TRL, Megatron, Transformers", LOSSES, MASK),
    Alias("attention_mask", "Transformers", "input", OF_LABELS),
    Alias("attention_mask", "Transformers", LOSSES, OF_LABELS),
    Alias(
        "output_layer",
        "Megatron",
        LOSSES,
        "install(model, ..) of integrations.megatron, or a MegatronHead as the output_processor",
    ),
    Alias(SETS, "ours, vLLM", "input", "'sets'"),
    Alias(SETS, "ours, vLLM", LOSSES, 'inputs={"sets": IdSets(..)}'),
    Alias(SETS, "ours, vLLM", "vocab_statistics, linear_vocab_statistics", "sets=IdSets(..)"),
    Alias("rollout_weight", "ours", "input", "PolicyGradient(.., rollout_weight=True)"),
    Alias("teacher_logits", "many", "input", "'teacher': Teacher(teacher_logits)"),
    Alias("teacher_logits", "many", LOSSES, 'inputs={"teacher": Teacher({})}'),
    Alias(
        "teacher_hidden, teacher_weight",
        "many",
        f"{LOSSES}, HeadLoss",
        'inputs={"teacher": TeacherHead(hidden, weight)}, of HeadLoss.linear',
    ),
    Alias("teacher_hidden", "many", "input", "'teacher': TeacherHead({}, weight)"),
    Alias("beta, student_temperature", "ours", "input", "Teacher(.., {}=..)"),
    Alias("temperature", "many", "input", TEMPERATURES),
    Alias(
        "num_items_in_batch",
        "Transformers",
        "HeadLoss.linear, VocabParallelHead.forward",
        "denominator=num_items_in_batch",
    ),
    Alias(
        "num_items_in_batch",
        "Transformers",
        "HeadLoss.forward",
        "denominator=num_items_in_batch; in the place of a Trainer's compute_loss_func, "
        "fuse_head(model, HeadLoss(..))",
    ),
    Alias("weight", "torch", "HeadLoss", "CrossEntropy(class_weight=..)"),
    Alias(
        "weight",
        "torch",
        "HeadLoss.forward",
        "token_weight=, CrossEntropy(class_weight=..), or of hidden states "
        "HeadLoss(..).linear(hidden, weight, labels)",
    ),
    Alias(
        "weight",
        "ours",
        "vocab_statistics, log_probs",
        "linear_vocab_statistics(hidden, weight, labels, ..).log_prob, of hidden states",
    ),
    Alias(
        "differentiable",
        "ours",
        "vocab_statistics, linear_vocab_statistics",
        "with torch.no_grad(): around the call",
    ),
    Alias("loss_weights, weights", "many", LOSSES, "token_weight="),
    Alias("target, targets", "torch, Liger, many", LOSSES, "labels="),
    Alias(
        "shift_labels",
        "Transformers",
        LOSSES,
        "labels=shift_labels; CausalLMLoss(..) takes labels to be shifted",
    ),
    Alias(
        "shift",
        "CCE",
        LOSSES,
        "labels=torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100), or of logits "
        "CausalLMLoss(..)",
    ),
    Alias(
        "want",
        "ours",
        "HeadLoss",
        'metrics="name of a statistic", or Term(.., want=..) and Metric(.., want=..) of your own',
    ),
    Alias(
        "want",
        "ours",
        "HeadLoss.forward, HeadLoss.linear",
        "HeadLoss(.., metrics=..), or vocab_statistics(.., want=..) for values per token",
    ),
    Alias(
        "want",
        "ours",
        "VocabParallelHead.forward",
        "head.statistics(hidden, labels, want=..), or metrics= of its HeadLoss",
    ),
    Alias(
        "want, metrics",
        "ours",
        "log_probs",
        "vocab_statistics(.., want=..), which log_probs is for log-prob and entropy",
    ),
    Alias(
        "padding_idx",
        "torch",
        "VocabParallelEmbedding",
        "embedding(ids).masked_fill((ids == padding_idx)[..., None], 0.0), of its result",
    ),
    Alias(
        "group, process_group",
        "torch",
        "clip_grad_norm_",
        "tensor_parallel_group={}, of parameters with tensor_model_parallel = True; others say "
        "their group themselves",
    ),
    Alias("foreach", "torch", "clip_grad_norm_", "nothing: it always works as with foreach=True"),
    Alias("input", "torch", "HeadLoss.forward", "logits="),
    Alias("_input", "Liger", "HeadLoss.linear", "hidden="),
    Alias("lin_weight", "Liger", "HeadLoss.linear", "weight="),
    Alias(
        "vocab_size",
        "many",
        f"HeadLoss, {CALLS}",
        "shard=VocabShard.from_group(group, vocab_size), of the call",
    ),
    Alias("label_smoothing", "torch", HEAD, "terms=CrossEntropy(label_smoothing=0.1)"),
    Alias("z_loss, lse_square_scale", "Megatron", HEAD, "terms=[CrossEntropy(), ZLoss(1e-4)]"),
    Alias(BONUSES, "verl, many", HEAD, "terms=[CrossEntropy(), Entropy({})]"),
    Alias(
        "reduction, denominator, token_weight",
        "torch, ours",
        HEAD,
        "nothing, because Megatron averages the losses itself, by its loss_mask",
    ),
    Alias("shard, group, process_group", "ours, torch", HEAD, "nothing, because the layer has it"),
    Alias(
        "transform, temperature, softcap",
        "ours, many",
        HEAD,
        "nothing, because only logits have them: HeadLoss(..)(logits, labels, transform=..)",
    ),
    Alias("inputs", "ours", HEAD, "nothing, because Megatron's call passes none"),
    Alias("loss_mask", "Megatron", HEAD, "model(.., labels=labels, loss_mask=loss_mask)"),
    Alias("output_layer", "Megatron", HEAD, "output_processor=head, an object, not the class"),
    Alias("gamma", "the paper, TRL", "simpo", "margin=gamma"),
    Alias(
        "sequence_parallel",
        "Megatron",
        "VocabParallelHead",
        'linear=Linear(hidden_grad="reduce_scatter")',
    ),
    Alias("shard, weight, bias", "ours", HEADS, "VocabParallelHead(.., {}=..), a call takes none"),
    Alias("kl_decay", "SpecForge", "LKLoss", "eta={}"),
    Alias("lk_loss_type", "SpecForge", "LKLoss", "form={}"),
    Alias(
        "labels",
        "Transformers",
        "causal_lm_loss",
        "model.loss_function = causal_lm_loss(model, ..), what it returns",
    ),
    Alias("logits", "ours, 0.2.0", "Linear", "exact_logits=True for 'float32', else nothing"),
    Alias("engine", "ours, 0.2.0", "Linear", "exact_logits=True for 'epilogue', else nothing"),
    Alias("over", "ours, 0.2.0", "TopKDistillation", "support="),
    Alias(
        "CrossEntropyLoss, NLLLoss, VocabParallelCrossEntropy, vocab_parallel_cross_entropy, "
        "ParallelCrossEntropy, FusedCrossEntropyLoss",
        "torch, Megatron, flash-attention, many",
        "package",
        "HeadLoss(), and call it, HeadLoss()(logits, labels, shard=shard)",
    ),
    Alias(
        "LigerFusedLinearCrossEntropyLoss, FusedLinearCrossEntropyLoss, linear_cross_entropy",
        "Liger, fla, CCE",
        "package",
        "HeadLoss().linear(hidden, weight, labels, shard=shard)",
    ),
    Alias("LabelSmoothing", "many", "package", "CrossEntropy(label_smoothing=0.1), a term"),
    Alias("KLDivLoss", "torch", "package", "Distillation(), a term"),
    Alias("ColumnParallelLinear", "Megatron", "package", "VocabParallelHead(hidden_size, shard)"),
    Alias("fuse_log_probs", "ours", "package", "tp_headloss.integrations.trl.{}"),
    Alias(
        "fuse_head, causal_lm_loss", "ours", "package", "tp_headloss.integrations.transformers.{}"
    ),
    Alias(
        "MegatronHead, MegatronHeadMixin, install",
        "ours",
        "package",
        "tp_headloss.integrations.megatron.{}",
    ),
    Alias("reference_free", "TRL", "dpo", "reference_chosen and reference_rejected of 0"),
)
