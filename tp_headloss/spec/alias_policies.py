"""More of the table of names elsewhere: those of policy optimisation."""

from .alias_table import BONUSES, DISTANCES, LOSSES, PRESETS, Alias

DUAL = f"PolicyGradient, PolicyMetrics, {DISTANCES}"
CLIPPED = f"PolicyGradient, PolicyMetrics, {PRESETS}"
BOUND = 'clip=(0.0, epsilon_high), convention="bound"'
KLS = "beta, kl_loss_coef, kl_coef, kl_coeff"
GENERATOR = "'rollout_weight', losses.truncated_importance_weight(old, generator_log_prob=..)"
TRUNCATED = "losses.truncated_importance_weight"
OF_ROLLOUT = (
    "rollout_log_probs, sampling_per_token_logps, rollout_log_prob, sampling_log_prob, "
    "behavior_log_prob, behaviour_log_prob, inference_log_prob, vllm_log_prob, sglang_log_prob"
)
WHOSE_ROLLOUT = "verl, TRL, many"
# of which the names of a call's inputs are no arguments
PARTS = f"HeadLoss, PolicyGradient, KLToReference, PolicyMetrics, GeneratorMetrics, {PRESETS}"
WEIGHTS = "truncated_importance_weight, icepop, sequence_masked_importance_weight"
# verl multiplies by dp_size, as gradients of its data-parallel ranks are averaged
AVERAGED = "{}, divided by dp_size where data-parallel ranks average their gradients"
HORIZON = "inputs={'sequences': Sequences.from_mask(mask, horizon={})} of the call, for DrGRPO(..)"
OLD = "old_log_probs, old_per_token_logps"
REFERENCE = "ref_log_prob, ref_log_probs, ref_per_token_logps"

OF_POLICIES = (
    Alias(
        "advantages, old_log_prob, reference_log_prob, generator_log_prob, rewards, num_bytes",
        "verl, ours",
        f"{LOSSES}, {PARTS}",
        'inputs={"{}": ..}, of the call',
    ),
    Alias("rollout_weight, rollout_log_weight, noise", "ours", LOSSES, 'inputs={"{}": ..}'),
    Alias(OLD, "verl, TRL", f"{LOSSES}, {PARTS}", 'inputs={"old_log_prob": ..}, of the call'),
    Alias(OLD, "verl, TRL", "input", "'old_log_prob'"),
    Alias(OLD, "verl, TRL", WEIGHTS, "log_prob={}, the first argument"),
    Alias("old_log_prob", "ours", WEIGHTS, "log_prob={}, the first argument"),
    Alias(
        REFERENCE,
        "verl, TRL",
        f"{LOSSES}, {PARTS}",
        'inputs={"reference_log_prob": ..}, of the call',
    ),
    Alias(REFERENCE, "verl, TRL", "input", "'reference_log_prob'"),
    Alias(
        OF_ROLLOUT,
        WHOSE_ROLLOUT,
        f"{LOSSES}, {PARTS}",
        f"inputs={{'rollout_weight': {TRUNCATED}(old, generator_log_prob=..)}}, of the call",
    ),
    Alias(OF_ROLLOUT, WHOSE_ROLLOUT, WEIGHTS, "generator_log_prob={}"),
    Alias("sets", "ours", LOSSES, 'inputs={"sets": IdSets(..)}'),
    Alias("batch_num_tokens", "verl", LOSSES, f"denominator={AVERAGED}"),
    Alias(
        "global_batch_size", "verl", LOSSES, f"with a reduction by sequence denominator={AVERAGED}"
    ),
    Alias(
        "dp_size",
        "verl",
        LOSSES,
        "denominator=total / dp_size, with the total of tokens, or sequences, of all ranks",
    ),
    Alias("loss_scale_factor, horizon", "verl, ours", f"{LOSSES}, {PARTS}", HORIZON),
    Alias("kl_loss_type", "verl", "KLToReference", "estimator={}"),
    Alias(
        "kl_loss_type, estimator",
        "verl, ours",
        f"PolicyGradient, {PRESETS}",
        "HeadLoss([PolicyGradient(..), KLToReference(weight, {})], ..), a preset's KL is k3",
    ),
    Alias("kl_loss_type", "verl", "HeadLoss", "a term, KLToReference(weight, {})"),
    Alias("use_kl_loss", "verl", PRESETS, "kl=weight, 0 for no KL"),
    Alias("use_kl_loss", "verl", "PolicyGradient, HeadLoss", "a term, KLToReference(weight)"),
    Alias("entropy", "ours", "PolicyGradient, HeadLoss", "a term, Entropy({})"),
    Alias(
        "tis_imp_ratio_cap, rollout_is_threshold, cap",
        "verl, TRL, many",
        "truncated_importance_weight, icepop",
        "bounds=(0.0, {})",
    ),
    Alias(
        "tis_imp_ratio_cap, rollout_is_threshold",
        "verl",
        f"PolicyGradient, HeadLoss, {PRESETS}",
        f"PolicyGradient(.., rollout_weight=True), and {TRUNCATED}(.., bounds=(0.0, {{}}))",
    ),
    Alias(
        "epsilon, epsilon_high",
        "TRL",
        DISTANCES,
        "clip=(epsilon, epsilon_high)",
    ),
    Alias(
        "epsilon, epsilon_high",
        "TRL",
        "PolicyMetrics",
        "clip=(epsilon, epsilon_high), of 'cispo' clip=(1.0, epsilon_high - 1)",
    ),
    Alias(
        "epsilon, epsilon_high",
        "TRL",
        "PolicyGradient",
        f"clip=(epsilon, epsilon_high), of 'cispo' {BOUND}",
    ),
    Alias("epsilon, epsilon_high", "TRL", "CISPO", BOUND),
    Alias("delta", "TRL", DUAL, "dual_clip=delta"),
    Alias(
        "clip_ratio_low, clip_ratio_high", "verl", CLIPPED, "clip=(clip_ratio_low, clip_ratio_high)"
    ),
    Alias("clip_low, clip_high", "many", CLIPPED, "clip=(clip_low, clip_high)"),
    Alias("clip_ratio_c", "verl", DUAL, "dual_clip=clip_ratio_c"),
    Alias("calculate_entropy", "verl", "log_probs", "entropy="),
    Alias(
        "sum_pi_squared",
        "verl",
        "log_probs",
        'vocab_statistics(.., want=("collision",)).collision',
    ),
    Alias("clip_ratio, cliprange", "verl, TRL", CLIPPED, "clip=({}, {})"),
    Alias(
        "clip_eps, eps_clip, clip_range", "OpenRLHF, Stable-Baselines3", CLIPPED, "clip=({}, {})"
    ),
    Alias(KLS, "TRL, verl, RLlib", PRESETS, "kl={}"),
    Alias(KLS, "TRL, verl, RLlib", "PolicyGradient, HeadLoss", "a term, KLToReference({})"),
    Alias(KLS, "TRL, verl, RLlib", "KLToReference", "KLToReference({})"),
    Alias(
        "use_bias_correction_kl",
        "TRL 1.16.0",
        f"KLToReference, PolicyGradient, HeadLoss, {PRESETS}",
        'HeadLoss([PolicyGradient(..), KLToReference(beta, "k3", importance_weight="old")], ..)',
    ),
    Alias(BONUSES, "verl, many", PRESETS, "entropy={}"),
    Alias(BONUSES, "verl, many", "PolicyGradient, HeadLoss", "a term, Entropy({})"),
    Alias(BONUSES, "verl, many", "Entropy", "Entropy({})"),
    Alias(
        "reduction, loss_agg_mode, loss_type",
        "torch, verl, TRL",
        PRESETS,
        "HeadLoss(PolicyGradient(..), reduction=..), a preset has its own",
    ),
    Alias(
        "loss_agg_mode, loss_type",
        "verl, TRL",
        "PolicyGradient, HeadLoss",
        "HeadLoss(.., reduction=..)",
    ),
    Alias(
        "gspo_token, gspo-token",
        "the paper, TRL",
        "value",
        "gspo",
        'PolicyGradient("gspo"), with advantages per token, whose gradient is GSPO-token\'s',
    ),
    Alias(
        "temperature",
        "many",
        "PolicyGradient",
        "transform=Transform(temperature=..), of the call, or of 'sapo' temperatures=(1.0, 1.05)",
    ),
    Alias(
        "tau_pos, tau_neg", "verl", "PolicyGradient", "temperatures=(tau_pos, tau_neg), of 'sapo'"
    ),
    Alias("tau", "the paper", "PolicyGradient", "temperatures=(tau, tau), of 'sapo'"),
    Alias(
        "pg_clipfrac, clip_ratio",
        "verl, Liger",
        "metric",
        'PolicyMetrics(..), as "pg_clip_fraction"',
    ),
    Alias(
        "pg_clipfrac_lower",
        "verl",
        "metric",
        'PolicyMetrics(.., dual_clip=..), as "pg_clip_fraction_lower"',
    ),
    Alias("ppo_kl", "verl", "metric", 'PolicyMetrics(..), as "approx_kl"'),
    Alias("probs_ratio", "NeMo-RL", "metric", 'PolicyMetrics(..), as "ratio"'),
    Alias(
        "kl_penalty", "NeMo-RL", "metric", 'PolicyMetrics(.., reference=True), as "kl_reference"'
    ),
    Alias(
        "clipped_ratio_fraction, ratio_clipped_frac",
        "Fast-LLM, torchtitan",
        "metric",
        'PolicyMetrics(..), as "clip_fraction"',
    ),
    Alias(
        f"{OF_ROLLOUT}, generator_log_probs",
        WHOSE_ROLLOUT,
        "input",
        "generator_log_prob",
        "'generator_log_prob', of GeneratorMetrics and KLToReference",
    ),
    # where nothing needs that
    Alias(f"{OF_ROLLOUT}, generator_log_probs", WHOSE_ROLLOUT, "input", GENERATOR),
    Alias(
        "generator_log_prob",
        "ours",
        "input",
        "metrics=GeneratorMetrics(), or 'rollout_weight', losses.truncated_importance_weight(..)",
    ),
    Alias("sets", "ours", "input", 'over="sets" of its terms, PolicyGradient(.., over="sets")'),
)
