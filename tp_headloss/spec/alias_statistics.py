"""The rows of `alias_table` about statistics: names of metrics, in `want`, and of keywords of the
functions that return statistics."""

from .alias_table import MASKS, OF_LABELS, STATISTICS, Alias

TOPK = "topk, topk_accuracy, top_k_accuracy, accuracy_topk, acc@k, accuracy@k, hits@k, recall@k"
UNWEIGHTED = (
    "labels of -100 where it is 0, labels.masked_fill({} == 0, -100), and multiply the statistics by "
    "other weights yourself"
)

OF_STATISTICS = (
    Alias("acc@1, accuracy@1, hits@1, top1, top1_accuracy", "many", "metric", '"accuracy"'),
    Alias(TOPK, "torchmetrics, many", "metric", "TopKAccuracy(k)"),
    Alias("correct", "ours", "metric", '"accuracy", whose calls have out.stats.correct'),
    Alias(
        "nll",
        "many",
        "metric",
        '"log_prob", of the other sign, or of a CrossEntropy() out.means()["loss/cross_entropy"]',
    ),
    Alias("mean_rank, ranks", "many", "metric", '"rank", whose mean out.means() has'),
    Alias("mrr", "many", "metric", 'Metric(lambda stats: {"mrr": 1 / stats.rank}, want=("rank",))'),
    Alias(
        "confidence",
        "many",
        "metric",
        "topk_log_probs(logits, 1).log_probs.exp(), a call of its own, of the likeliest ids",
    ),
    Alias(
        "ece, calibration_error",
        "many",
        "metric",
        "bins of topk_log_probs(logits, 1).log_probs.exp(), as docs/guides/evaluation.md does",
    ),
    Alias(
        "accuracy, acc, correct", "many", "want", 'want=("argmax",), with which they have .correct'
    ),
    Alias(
        "perplexity, ppl", "many", "want", 'HeadLoss(metrics="perplexity"), whose means() have it'
    ),
    Alias("kl, kl_div", "many", "want", 'want=("forward_kl",), with teacher=Teacher(..)'),
    Alias("tv, tvd", "many", "want", 'want=("total_variation",), with teacher=Teacher(..)'),
    Alias(
        "acceptance_rate, accept_rate",
        "SpecForge, speculators",
        "want",
        'want=("overlap",), with teacher=Teacher(..)',
    ),
    Alias(
        "log_prob, log_probs, logprobs, logps, nll",
        "many",
        "want",
        "nothing: .log_prob of the labels is always there, and that of other ids is "
        'want=("log_probs_at",), ids=ids',
    ),
    Alias(
        f"{TOPK}, topk_ids, topk_log_probs",
        "many",
        "want",
        "topk_log_probs(logits, k=..), a call of its own",
    ),
    Alias(
        "log_prob, logprobs, logps, per_token_logps",
        "many",
        "value",
        "log_probs",
        '"log_probs" in outputs= of fuse_log_probs',
    ),
    Alias(
        "accuracy, token_accuracy, correct, argmax",
        "many, ours",
        "value",
        "is_top1",
        '"is_top1" in outputs= of fuse_log_probs',
    ),
    Alias(
        "Family, Tile, Softmax, Merging, Joined, row_sum",
        "ours",
        "package",
        "tp_headloss.statistics.family.{}",
    ),
    Alias("JSD, LigerFusedLinearJSD", "Liger", "package", 'Distillation(divergence="jsd"), a term'),
    Alias("hits, mass", "ours", "want", '"argmax" for .hits, "total" for .mass'),
    Alias(f"{MASKS}, token_weight", "verl, TRL, ours", STATISTICS, UNWEIGHTED),
    Alias("attention_mask", "Transformers", STATISTICS, OF_LABELS),
    Alias(
        "reduction",
        "torch",
        STATISTICS,
        "nothing, because statistics are per token: .log_prob.sum() is their sum, 0 where ignored, "
        "and HeadLoss(.., reduction=..) a loss",
    ),
    Alias(
        "teacher, sets, ids, total_weight",
        "ours",
        "log_probs",
        "vocab_statistics(.., {}=.., want=..), which log_probs is for log-prob and entropy",
    ),
    Alias("nll, nll_loss, ce, loss", "torch, many", "term", "CrossEntropy()"),
    Alias(
        "kl_div, fkl, rkl, js, tv, tvd, total_variation",
        "many",
        "term",
        'Distillation(1.0, "forward_kl"), or another divergence',
    ),
    Alias(
        "num_samples, num_return_sequences, n",
        "torch, Transformers, vLLM",
        "sample",
        "logits[None].expand({}, *logits.shape), with positions of their own",
    ),
    Alias("generator", "torch", "sample", "seed=, an int, and positions="),
    Alias(
        "metrics",
        "ours",
        "vocab_statistics, linear_vocab_statistics",
        "want=.., for values per token, or HeadLoss(.., metrics=..)",
    ),
)
