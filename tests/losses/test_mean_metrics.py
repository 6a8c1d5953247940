"""`mean_metrics`: sums become means, extrema stay, over micro-batches and over ranks with other
tokens."""

import copy
import operator
import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from torch.utils import _pytree

import tp_headloss as hl

V, PARTS = 11, 4
HEAD = hl.HeadLoss(
    [hl.CrossEntropy(), hl.Entropy(0.1)],
    metrics=(
        "entropy",
        "accuracy",
        hl.Metric(lambda stats: {f"{kind}_lse": stats.lse for kind in ("max", "min")}),
    ),
)


def batches():
    """Micro-batches of different numbers of valid tokens; the last has none."""
    generator = torch.Generator().manual_seed(0)
    x, labels = (
        torch.randn(PARTS, 6, V, generator=generator),
        torch.randint(V, (PARTS, 6), generator=generator),
    )
    labels[1, 2:] = labels[3] = -100
    return x, labels


def means_of_rank(group, device):
    x, labels = (part.to(device) for part in batches())
    world, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    outputs = [HEAD(x[i], labels[i], denominator=7) for i in range(rank, PARTS, world)]
    return hl.mean_metrics(outputs, group)


@pytest.mark.parametrize("world_size", [1, 2])
def test_means_are_those_of_all_valid_tokens_together(world_size):
    x, labels = batches()
    valid = labels != -100
    stats = hl.vocab_statistics(x.double(), labels, want=("entropy", "argmax"))
    wanted = {
        "loss": (-stats.log_prob - 0.1 * stats.entropy)[valid].mean(),
        "loss/cross_entropy": -stats.log_prob[valid].mean(), "loss/entropy": -stats.entropy[valid].mean(),
        "weighted/entropy": -0.1 * stats.entropy[valid].mean(), "entropy": stats.entropy[valid].mean(),
        "accuracy": stats.correct[valid].double().mean(), "max_lse": stats.lse[valid].max(),
        "min_lse": stats.lse[valid].min(),
    }  # fmt: skip
    for found in on_ranks(world_size, means_of_rank):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("mode", ["logits", "recompute", "one_sweep", "dropped"])
def test_terms_with_token_weights_of_their_own_are_divided_by_these(mode):
    """Over two micro-batches, whatever the losses were divided by."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(PARTS, 6, 8, generator=generator),
        torch.randn(V, 8, generator=generator),
    )
    _, labels = batches()
    class_weight, rewards = (
        torch.rand(V, generator=generator),
        torch.randn(PARTS, 6, generator=generator),
    )
    terms = [
        hl.CrossEntropy(class_weight=class_weight),
        hl.ZLoss(0.5),
        hl.PolicyGradient("positive-nll"),
    ]
    head = hl.HeadLoss(terms, metrics="entropy")
    outputs = []
    for i in range(2):
        given = {"denominator": 3.0, "inputs": {"rewards": rewards[i]}}
        if mode == "logits":
            outputs.append(head(hidden[i] @ weight.T, labels[i], **given))
        else:
            how = (
                hl.Linear("recompute", max_valid_tokens=8) if mode == "dropped" else hl.Linear(mode)
            )
            w = weight.clone().requires_grad_()
            outputs.append(head.linear(hidden[i], w, labels[i], linear=how, **given))
    found = hl.mean_metrics(outputs)
    x, y = hidden[:2].double() @ weight.double().T, labels[:2]
    log_p, valid = x.log_softmax(-1), y != -100
    chosen = valid & (rewards[:2] > 0)
    wanted = {
        "loss/cross_entropy": F.cross_entropy(x.flatten(0, 1), y.flatten(), class_weight.double()),
        "loss/z_loss": (x.logsumexp(-1) ** 2)[valid].mean(),
        "loss/positive_nll": -log_p.gather(-1, y.clamp(min=0)[..., None])[..., 0][chosen].mean(),
        "entropy": -(log_p.exp() * log_p).sum(-1)[valid].mean(),
    }
    wanted["weighted/z_loss"] = 0.5 * wanted["loss/z_loss"]
    wanted["loss"] = (
        wanted["loss/cross_entropy"] + wanted["weighted/z_loss"] + wanted["loss/positive_nll"]
    )
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=2e-6, atol=1e-6, msg=f"{name}: {found[name]}, {value}"
        )
    weighted = sum(w * x.double() for w, x in zip((1, 0.5, 1), outputs[0].terms.values()))
    torch.testing.assert_close(outputs[0].loss.double() * 3, weighted)


def test_a_reduction_by_sequence_divides_every_term_by_its_sequences():
    x, labels = batches()
    head = hl.HeadLoss(
        hl.CrossEntropy(class_weight=torch.rand(V)),
        metrics="log_prob",
        reduction="seq-mean-token-sum",
    )
    out = head(x, labels, inputs={"sequences": hl.Sequences.from_mask(labels != -100)})
    assert not out.term_counts
    torch.testing.assert_close(out.metrics["log_prob"], out.stats.log_prob.sum())
    torch.testing.assert_close(hl.mean_metrics(out)["loss/cross_entropy"].float(), out.loss)


def test_sums_are_unknown_where_more_tokens_are_valid_than_there_is_place_for():
    x, labels = batches()
    head = hl.HeadLoss(hl.CrossEntropy(class_weight=torch.rand(V)), metrics="accuracy")
    out = head.linear(
        x[0], torch.eye(V), labels[0], linear=hl.Linear("recompute", max_valid_tokens=2)
    )
    assert all(
        value.isnan()
        for sums in (out.terms, out.metrics, out.term_counts)
        for value in sums.values()
    )
    assert len(out.terms) == len(out.metrics) == len(out.term_counts) == 1 and out.count.isnan()


def test_a_metric_with_the_name_of_a_term_has_its_mean():
    """Of the named metrics, which a kernel sums, and of others; whether or not the term's weight is
    1."""
    x, labels = batches()
    lse = hl.vocab_statistics(x, labels).lse[labels != -100].double().mean()
    teacher = {"teacher": hl.Teacher(x.flip(-1))}
    for weight in (1.0, 0.5):
        found = hl.HeadLoss([hl.Distillation(weight)], metrics="forward_kl")(
            x, labels, inputs=teacher
        ).means()
        torch.testing.assert_close(found["forward_kl"], found["loss/forward_kl"])
        own = hl.Metric(lambda stats: {"cross_entropy": stats.lse})
        found = hl.HeadLoss(hl.CrossEntropy(weight), metrics=own)(x, labels).means()
        torch.testing.assert_close(found["cross_entropy"], lse, rtol=1e-6, atol=0)
        assert ("weighted/cross_entropy" in found) == (weight != 1)


@pytest.mark.parametrize("name, said", [("hard", ": did you mean 'hrad'?"), ("words", "")])
def test_a_count_of_a_metric_that_nothing_returns_is_an_error(name, said):
    x, labels = batches()
    count = f"count/{name}"
    words = re.escape(f"'{count}' is the divisor of a metric '{name}', which nothing returns, got ")
    metric = hl.Metric(lambda stats: {"hrad": stats.lse, count: stats.valid})
    with pytest.raises(ValueError, match=words + r"metrics \['hrad'\]" + re.escape(said) + "$"):
        hl.HeadLoss(metrics=metric)(x, labels)
    alone = hl.Metric(lambda stats: {count: stats.valid})
    with pytest.raises(ValueError, match=words + r"metrics \[\]$"):
        hl.HeadLoss(metrics=["entropy", alone])(x, labels)
    extremum = hl.Metric(lambda stats: {"max_lse": stats.lse, "count/max_lse": stats.valid})
    with pytest.raises(ValueError, match="must divide a sum, got the extremum 'max_lse'"):
        hl.HeadLoss(metrics=extremum)(x, labels)
    # what another one returns, and a named metric
    of_other = hl.Metric(lambda stats: {name: stats.lse})
    hl.HeadLoss(metrics=[metric, of_other])(x, labels)
    hl.HeadLoss(metrics=[hl.Metric(lambda s: {"a": s.lse, "count/accuracy": s.valid})])(x, labels)


@pytest.mark.parametrize("made", [float, torch.tensor])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_means_are_of_the_weights_that_were_optimised(made, reduction):
    """Weights that change between the call and the log: tensors in place, numbers by new terms."""
    x, labels = batches()
    labels = labels.clamp(min=0)
    weight, outputs = made(0.5), []
    head = hl.HeadLoss([hl.CrossEntropy(weight), hl.ZLoss(0.1)], reduction=reduction)
    for i, value in enumerate((1.0, 0.5, 1.0)):
        if made is float:
            head.terms = [hl.CrossEntropy(value), hl.ZLoss(0.1)]
        else:
            weight.fill_(value)
        outputs.append(head(x[i], labels[i]))
    tokens = 1 if reduction == "mean" else labels[0].numel()
    for out in outputs:
        torch.testing.assert_close(out.means()["loss"].float(), out.loss / tokens)
    found = hl.mean_metrics(outputs)
    torch.testing.assert_close(found["loss"].float(), sum(out.loss for out in outputs) / 3 / tokens)
    torch.testing.assert_close(
        found["loss"], found["weighted/cross_entropy"] + found["weighted/z_loss"]
    )


def test_with_sequences_metrics_are_means_over_tokens_and_terms_over_sequences():
    x, labels = batches()
    sequences = hl.Sequences.from_mask(labels != -100)
    head = hl.HeadLoss(metrics=("log_prob",), reduction="seq-mean-token-sum")
    out = head(x, labels, inputs={"sequences": sequences})
    found, log_prob = hl.mean_metrics(out), out.stats.log_prob
    assert found["num_tokens"] == (labels != -100).sum()
    torch.testing.assert_close(
        found["log_prob"].float(), log_prob.sum() / found["num_tokens"].float()
    )
    torch.testing.assert_close(found["loss/cross_entropy"].float(), out.loss)


def test_what_is_no_output_and_what_has_no_tokens():
    x, labels = batches()
    out = HEAD(x[3], labels[3])
    found = hl.mean_metrics(out)
    assert found["accuracy"].isnan() and found["max_lse"] == -torch.inf
    with pytest.raises(TypeError, match=r"outputs must be `HeadLossOutput`, or .*, got MetricSums"):
        hl.mean_metrics(out.metrics)
    with pytest.raises(TypeError, match=r"got \[MetricSums\]"):
        hl.mean_metrics([out.metrics])
    with pytest.raises(ValueError, match="at least one"):
        hl.mean_metrics([])
    with pytest.raises(
        ValueError, match=r"same terms and metrics in the same order, got \[\['loss/cross_entropy',"
    ):
        hl.mean_metrics([out, hl.HeadLoss()(x[0], labels[0])])


def output_of(reduction, device="cpu"):
    x, labels = (tensor.to(device) for tensor in batches())
    given = {"sequences": hl.Sequences.from_mask(labels != -100, horizon=9)}
    return hl.HeadLoss(reduction=reduction)(x, labels, inputs=given)


def other_reductions_run(group, device, reductions):
    out = output_of(reductions[dist.get_rank(group)], device)
    try:
        return float(hl.mean_metrics(out, group)["loss"])
    except ValueError as error:
        return str(error)


def test_sums_over_tokens_and_over_sequences_have_no_mean_together():
    """Their names are the same, and their counts are of tokens and of sequences."""
    for reduction, other in (
        ("mean", "seq-mean-token-mean"),
        ("seq-mean-token-mean", "seq-mean-token-sum"),
        ("seq-mean-token-sum", "seq-mean-token-sum-norm"),
    ):
        words = re.escape(
            f"whose sums are others than those over tokens, got ['{reduction}', '{other}']"
        )
        with pytest.raises(ValueError, match=words):
            hl.mean_metrics([output_of(reduction), output_of(other)])
    per_token = output_of("mean")
    found = hl.mean_metrics([per_token, output_of("sum")])
    torch.testing.assert_close(found["loss"], per_token.means()["loss"])
    assert per_token.reduction == "mean"


def test_ranks_with_other_reductions_are_told_so():
    first, second = on_ranks(2, other_reductions_run, ("mean", "seq-mean-token-mean"))
    assert "'count of tokens'] on rank 0 of the group, and others on ranks [1]" in first
    assert "'count of seq-mean-token-mean'] on rank 1 of the group" in second
    same = on_ranks(2, other_reductions_run, ("mean", "sum"))
    assert same[0] == same[1] == pytest.approx(float(output_of("mean").means()["loss"]))


@pytest.mark.parametrize("reduction", ["mean", "seq-mean-token-mean"])
def test_an_outputs_means_have_its_loss(reduction):
    """In the sum of the weighted terms, also where a weight is a tensor."""
    x, labels = batches()
    head = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(torch.tensor(0.5))], reduction=reduction)
    inputs = {"sequences": hl.Sequences.from_mask(labels != -100)} if reduction != "mean" else None
    found, loss = (out := head(x.requires_grad_(), labels, inputs=inputs)).means(), out.loss
    torch.testing.assert_close(found["loss"].float(), loss.detach())
    torch.testing.assert_close(
        found["loss"], found["loss/cross_entropy"] + found["weighted/z_loss"]
    )
    assert "weighted/cross_entropy" not in found and not found["loss"].requires_grad


def test_an_output_is_read_as_its_loss():
    x, labels = batches()
    out = hl.HeadLoss([hl.CrossEntropy(), hl.ZLoss(0.5)], metrics="accuracy")(
        x.requires_grad_(), labels
    )
    assert (
        float(out) == out.loss.item()
        and f"{out:.3f}" == f"{out.loss.item():.3f}"
        and f"{out}" == str(out)
    )
    out.backward(retain_graph=True)
    torch.testing.assert_close(x.grad, torch.autograd.grad(out.loss, x)[0], rtol=0, atol=0)
    shown = f"loss={out.loss.item():.6g}, count=14, terms=[cross_entropy, z_loss], metrics=[accuracy], stats=[4, 6]"
    assert str(out) == f"HeadLossOutput({shown})"
    assert "loss=[4, 6]," in str(hl.HeadLoss(reduction="none")(x, labels))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_arithmetic_of_outputs_is_that_of_their_losses(reduction):
    """A NamedTuple's own would be concatenation and repetition, and no error before its
    `backward`."""
    x, labels = batches()
    out = hl.HeadLoss(reduction=reduction)(x.requires_grad_(), labels)
    loss, aux = out.loss, torch.tensor(3.0)
    for of in (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow):
        for given, expected in (
            ((out, 2), (loss, 2)),
            ((2, out), (2, loss)),
            ((out, out), (loss, loss)),
        ):
            torch.testing.assert_close(of(*given), of(*expected), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(of(aux, out), of(aux, loss), rtol=0, atol=0)
    for of in (operator.lt, operator.le, operator.gt, operator.ge):
        assert torch.equal(of(out, aux), of(loss, aux)) and torch.equal(of(3.0, out), of(3.0, loss))
    assert torch.equal(-out, -loss) and not hasattr(out, "item")
    with pytest.raises(AttributeError, match=r"has no 'detach': its loss is the tensor out\.loss"):
        out.detach()
    torch.testing.assert_close(sum([out, out]), 2 * loss, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad((0.5 * out + aux).sum(), x, retain_graph=True)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(0.5 * loss.sum(), x)[0], rtol=0, atol=0
    )


def test_perplexity_bits_per_byte_and_topk_accuracy_are_those_of_all_tokens():
    """Of two micro-batches together: a ratio of sums, and exp of a mean, not means of ratios."""
    x, labels = batches()
    num_bytes = torch.arange(24).view(PARTS, 6)
    head = hl.HeadLoss(
        metrics=("perplexity", hl.TopKAccuracy(3), hl.TopKAccuracy(), hl.BitsPerByte())
    )
    outputs = [head(x[i], labels[i], inputs={"num_bytes": num_bytes[i]}) for i in range(PARTS)]
    found, valid = hl.mean_metrics(outputs), labels != -100
    log_p = x.double().log_softmax(-1)[valid]
    of_label = log_p.gather(1, labels[valid][:, None])
    assert list(found)[2:] == ["perplexity", "top3_accuracy", "top5_accuracy", "bits_per_byte"]
    torch.testing.assert_close(found["perplexity"], (-of_label).mean().exp(), rtol=1e-6, atol=0)
    for k in (3, 5):
        hits = (log_p.topk(k).indices == labels[valid][:, None]).any(1)
        torch.testing.assert_close(found[f"top{k}_accuracy"], hits.double().mean())
    bits = (
        -of_label.sum() / torch.log(torch.tensor(2.0, dtype=torch.float64)) / num_bytes[valid].sum()
    )
    torch.testing.assert_close(found["bits_per_byte"], bits, rtol=1e-6, atol=0)


def refused_group(group, device, is_other):
    """is_other: the means are over another group of the same ranks."""
    others = torch.distributed.new_group() if is_other else group
    shard = hl.VocabShard.from_group(group, V)
    x, labels = (part.to(device) for part in batches())
    out = HEAD(x[..., shard.start : shard.stop], labels, shard=shard)
    try:
        hl.mean_metrics(out, others)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("is_other", [False, True])
def test_the_group_of_the_vocabulary_is_refused(is_other):
    for message in on_ranks(2, refused_group, is_other):
        assert "got the group of a VocabShard" in message


def larger_group_run(group, device):
    """Four ranks, of which 0 and 1, and 2 and 3 share a vocabulary."""
    pairs = [torch.distributed.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))]
    rank = torch.distributed.get_rank(group)
    shard = hl.VocabShard.from_group(pairs[rank // 2], V)
    x, labels = (part.to(device) for part in batches())
    out = HEAD(x[..., shard.start : shard.stop], labels, shard=shard)
    with pytest.raises(
        ValueError, match=r"another one with several of its ranks, .* several times"
    ):
        hl.mean_metrics(out, group)
    with pytest.raises(ValueError, match="pass the group of ranks that have this rank's part"):
        hl.reduce_metrics(out.metrics, group)
    own = pairs[2 + rank % 2]
    cycle = [out.means()["loss"] - hl.mean_metrics(out, own)["loss"], shard]
    cycle.append(cycle)
    del shard, out
    difference = float(cycle[0])
    del cycle  # a shard that nobody can use any more is none
    sums = hl.reduce_metrics({"a": torch.ones((), device=device)}, group)
    return difference, sums["a"].item()


def test_a_group_that_has_ranks_of_one_vocabulary_among_others_is_refused():
    assert on_ranks(4, larger_group_run) == [(0.0, 4.0)] * 4


@pytest.mark.parametrize(
    "name",
    [
        "perplexity",
        "loss",
        "num_tokens",
        "num_sequences",
        "loss/own",
        "weighted/own",
        "count/loss/own",
    ],
)
def test_a_metric_takes_no_name_that_has_a_meaning(name):
    head = hl.HeadLoss(metrics=hl.Metric(lambda stats: {name: stats.lse}))
    with pytest.raises(ValueError, match=f"a metric must not return .'{name}'."):
        head(torch.zeros(2, V), torch.tensor([0, 1]))


@pytest.mark.parametrize("count", [torch.tensor(5.0), torch.ones(2, 1)])
def test_bytes_are_those_of_each_label(count):
    head, x, labels = (
        hl.HeadLoss(metrics=hl.BitsPerByte()),
        torch.zeros(2, 3, V),
        torch.zeros(2, 3).long(),
    )
    with pytest.raises(ValueError, match="input 'num_bytes' must"):
        head(x, labels, inputs={"num_bytes": count})


def test_check_finds_bytes_that_cannot_be():
    """Of a token that counts. One token may have none, such as the end of a text."""
    head = hl.HeadLoss(metrics=hl.BitsPerByte(), options=hl.Options(check=True))
    x, labels = torch.zeros(3, V), torch.tensor([1, -100, 2])
    for right in ([4, 0, 2], [4, -1, 2], [0, 1, 2]):
        head(x, labels, inputs={"num_bytes": torch.tensor(right)})
    with pytest.raises(ValueError, match=r"'num_bytes' of token 2 .* at least 0, got -1"):
        head(x, labels, inputs={"num_bytes": torch.tensor([4, 1, -1])})
    with pytest.raises(ValueError, match="'num_bytes' must be above 0 for some token"):
        head(x, labels, inputs={"num_bytes": torch.tensor([0, 3, 0])})
    ignored = torch.full_like(labels, -100)
    head(x, ignored, inputs={"num_bytes": torch.zeros(3)})


def test_the_sum_of_perplexity_is_that_of_log_probs_until_a_mean_is_made_of_it():
    x, labels = batches()
    outputs = [hl.HeadLoss(metrics=("log_prob", "perplexity"))(*batch) for batch in zip(x, labels)]
    for out in outputs:
        assert torch.equal(out.metrics["perplexity"], out.metrics["log_prob"])
    sums = hl.reduce_metrics(hl.combine_metrics([out.metrics for out in outputs]), None)
    count = sum(out.count for out in outputs).double()
    by_hand = (-sums["perplexity"] / count).exp()
    torch.testing.assert_close(by_hand, hl.mean_metrics(outputs)["perplexity"], rtol=0, atol=0)


def test_tokens_of_no_sequence_have_no_loss():
    """Whatever the mask says."""
    mask, advantages = torch.ones(6, dtype=torch.bool), torch.arange(6.0)
    logits, labels = torch.randn(6, V), torch.randint(V, (6,))
    old = hl.vocab_statistics(logits, labels).log_prob
    sequences = hl.Sequences.from_ids(torch.tensor([0, 0, 0, 0, -1, 1]), 1, mask)
    inputs = {"advantages": advantages, "old_log_prob": old, "sequences": sequences}
    out = hl.HeadLoss(hl.PolicyGradient())(logits, labels, inputs=inputs)
    assert out.count == 4 and torch.allclose(out.loss, -advantages[:4].mean())


def test_means_are_not_added_up():
    means = hl.HeadLoss()(torch.zeros(2, 4), torch.tensor([0, 3])).means()
    for add in (lambda: hl.combine_metrics([means, means]), lambda: hl.reduce_metrics(means, None)):
        with pytest.raises(ValueError, match="metrics must be sums by name, got means"):
            add()


def test_means_in_a_plain_dict_are_not_added_up():
    out = hl.HeadLoss()(torch.zeros(2, 4), torch.tensor([0, 3]))
    means = dict(out.means())
    for add in (lambda: hl.combine_metrics([means, means]), lambda: hl.reduce_metrics(means, None)):
        with pytest.raises(ValueError, match="got 'loss' beside 'loss/cross_entropy', which are"):
            add()
    # sums of one's own
    terms = {f"loss/{name}": x for name, x in out.terms.items()}
    for sums in (terms, {"loss": out.loss * out.count}, dict(out.terms), out.terms, out.metrics):
        assert list(hl.combine_metrics([sums, sums])) == list(sums)
        assert list(hl.reduce_metrics(sums, None)) == list(sums)


def test_a_mean_perplexity_in_a_dict_of_ones_own_is_not_added_up():
    out = hl.HeadLoss(metrics=("perplexity",))(torch.zeros(2, 4), torch.tensor([0, 3]))
    mean = {"perplexity": out.means()["perplexity"]}
    for add in (lambda: hl.combine_metrics([mean, mean]), lambda: hl.reduce_metrics(mean, None)):
        with pytest.raises(ValueError, match=r"got a 'perplexity' above 0, .* it is a mean, whose"):
            add()
    assert hl.combine_metrics([out.metrics])["perplexity"] < 0


def test_means_are_no_number():
    means = hl.HeadLoss()(torch.zeros(2, 4), torch.tensor([0, 3])).means()
    said = r"got means by name, \['loss', 'loss/cross_entropy'\]: take one, such as \['loss'\]"
    for use in (lambda: float(means), lambda: f"{means:.3f}"):
        with pytest.raises(TypeError, match=said):
            use()
    assert f"{means}" == repr(means) and float(means["loss"]) > 1
    with pytest.raises(TypeError, match="got metrics by name"):
        float(hl.HeadLoss()(torch.zeros(2, 4), torch.tensor([0, 3])).metrics)


# what an output lacks, and what its error says
MISSING = {
    "a metric of policies": (
        lambda out: out.metrics["pg_clip_fraction"],
        "no metric 'pg_clip_fraction', there are ['entropy']: write metrics=PolicyMetrics(..) of",
    ),
    "a host's name of a metric": (
        lambda out: out.metrics["ppo_kl"],
        "there are ['entropy']: write PolicyMetrics(..), as \"approx_kl\"",
    ),
    "a metric that nobody knows": (
        lambda out: out.metrics["xyz"],
        "no metric 'xyz', there are ['entropy']: others come with metrics= of the HeadLoss",
    ),
    "a term": (
        lambda out: out.terms["ppo"],
        "no term 'ppo', there are ['cross_entropy']: a term has the name of its objective",
    ),
    "a metric among terms": (
        lambda out: out.terms["entropy"],
        "no term 'entropy', there are ['cross_entropy']: metrics are in out.metrics",
    ),
    "a metric of sequences": (
        lambda out: out.sequence_metrics["ratio"],
        "no sequence metric 'ratio', there are []: they are those of metrics= in calls with",
    ),
    "a mean": (
        lambda out: out.means()["tokens_different"],
        "no mean 'tokens_different', there are ['loss', 'loss/cross_entropy', 'entropy']: write "
        "metrics=GeneratorMetrics(..) of",
    ),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_name_that_an_output_lacks_is_an_error_with_what_to_write(what):
    read, words = MISSING[what]
    out = hl.HeadLoss(metrics="entropy")(torch.zeros(2, V), torch.tensor([1, 2]))
    with pytest.raises(KeyError) as error:
        read(out)
    assert words in error.value.args[0]


def test_sums_by_name_are_dictionaries_to_everyone_else():
    """To equality, to copies, to torch's trees, and to compiled functions that get or make them."""
    x, labels = batches()
    inputs = {"sequences": hl.Sequences.from_mask(labels != -100)}
    out = HEAD(x, labels, inputs=inputs)
    for found in (out.terms, out.metrics, out.sequence_metrics, out.means()):
        assert isinstance(found, dict) and found == dict(found) and repr(found) == repr({**found})
        again = pickle.loads(pickle.dumps(found))
        assert type(again) is type(found) and again == found == copy.deepcopy(found)
        assert found.get("xyz") is None and "xyz" not in found
        leaves, spec = _pytree.tree_flatten(found)
        assert leaves == list(found.values())
        twice = _pytree.tree_map(lambda value: 2 * value, found)
        assert type(twice) is type(found) and twice == {k: 2 * v for k, v in found.items()}
        assert [path[0].key for path, _ in _pytree.tree_flatten_with_path(found)[0]] == [*found]
        assert _pytree.tree_unflatten(leaves, spec) == found

    @torch.compile(fullgraph=True, backend="eager")
    def total(out):
        return out.loss + out.terms["cross_entropy"] + out.metrics["entropy"]

    assert total(out) == out.loss + out.terms["cross_entropy"] + out.metrics["entropy"]


# names of metrics, and who makes them
MAKERS = {
    "PolicyMetrics(..)": hl.PolicyMetrics(),
    "PolicyMetrics(.., dual_clip=..)": hl.PolicyMetrics(dual_clip=3.0),
    "PolicyMetrics(.., reference=True)": hl.PolicyMetrics(reference=True),
    "GeneratorMetrics(..)": hl.GeneratorMetrics(),
}


def test_every_name_that_a_maker_of_metrics_makes_leads_to_it():
    labels = torch.tensor([[1, 2]])
    known = set()
    for written, metric in MAKERS.items():
        inputs = {name: torch.full((1, 2), -1.0) for name in metric.inputs}
        found = hl.HeadLoss(metrics=metric)(torch.zeros(1, 2, V), labels, inputs=inputs).metrics
        for name in set(found) - known:
            with pytest.raises(
                ValueError, match=re.escape(f"write metrics={written} of") + "|write Pol"
            ):
                hl.HeadLoss(metrics=name)
        known |= set(found)
    assert len(known) > 25
    with pytest.raises(ValueError, match=re.escape("write TopKAccuracy(3)")):
        hl.HeadLoss(metrics="top3_accuracy")
    for name, maker in (
        ("bits_per_byte", "BitsPerByte()"),
        ("acceptance_rate", "AcceptanceRate()"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"write {maker}")):
            hl.HeadLoss(metrics=name)
