"""More of the table of names elsewhere: those of policy optimisation."""

from .alias_table import GENERATOR, Alias

WRITTEN_OF_POLICIES = (
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
