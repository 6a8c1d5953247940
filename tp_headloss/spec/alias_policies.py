"""More of the table of names elsewhere: those of policy optimisation."""

from .alias_table import BONUSES, DISTANCES, PRESETS, Alias

DUAL = f"PolicyGradient, PolicyMetrics, {DISTANCES}"
CLIPPED = f"PolicyGradient, PolicyMetrics, {PRESETS}"
BOUND = 'clip=(0.0, epsilon_high), convention="bound"'
KLS = "beta, kl_loss_coef, kl_coef, kl_coeff"
GENERATOR = "'rollout_weight', losses.truncated_importance_weight(old, generator_log_prob=..)"

OF_POLICIES = (
    Alias(
        "epsilon, epsilon_high",
        "TRL",
        f"PolicyMetrics, {DISTANCES}",
        "clip=(epsilon, epsilon_high)",
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
        "rollout_log_probs, sampling_per_token_logps",
        "verl, TRL",
        "input",
        "generator_log_prob",
        "'generator_log_prob', of GeneratorMetrics and KLToReference",
    ),
    # where nothing needs that
    Alias("rollout_log_probs, sampling_per_token_logps", "verl, TRL", "input", GENERATOR),
    Alias(
        "generator_log_prob",
        "ours",
        "input",
        "metrics=GeneratorMetrics(), or 'rollout_weight', losses.truncated_importance_weight(..)",
    ),
    Alias("sets", "ours", "input", 'over="sets" of its terms, PolicyGradient(.., over="sets")'),
)
