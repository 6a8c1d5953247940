"""`Options(validate="full")`: a mistake on one rank alone is the same exception on every rank, at
once."""

import time
from dataclasses import replace
from functools import partial
from itertools import combinations
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT, Failure, on_a_group_of_one, on_ranks

import tp_headloss as hl
from tp_headloss.call import agreement

V, N, H = 128, 6, 8
FULL = hl.Options(validate="full")
RULE = hl.SamplingRule(top_k=5, top_p=0.9)


class Call:
    """What one rank is about to do; the last rank's is spoiled by a function of its name below."""

    def __init__(self, group, device):
        self.shard = hl.VocabShard.from_group(group, V)
        self.x = torch.randn(N, V, device=device)[
            :, self.shard.start : self.shard.stop
        ].requires_grad_()
        self.labels = torch.randint(0, V, (N,), device=device)
        self.hidden = torch.randn(N, H, device=device)
        self.weight = torch.randn(V, H, device=device)[
            self.shard.start : self.shard.stop
        ].requires_grad_()
        self.options, self.transform, self.terms, self.inputs = (
            FULL,
            hl.Transform(),
            [hl.CrossEntropy()],
            {},
        )
        self.keywords = {}

    def statistics(self):
        return hl.vocab_statistics(
            self.x,
            self.labels,
            shard=self.shard,
            transform=self.transform,
            options=self.options,
            **self.keywords,
        ).log_prob

    def head(self):
        head_loss = hl.HeadLoss(self.terms, options=self.options, **self.keywords)
        inputs = {"shard": self.shard, "transform": self.transform, "inputs": self.inputs}
        return head_loss(self.x, self.labels, **inputs).loss

    def linear_head(self):
        head_loss, linear = (
            hl.HeadLoss(self.terms, options=self.options),
            hl.Linear(**self.keywords),
        )
        return head_loss.linear(
            self.hidden, self.weight, self.labels, shard=self.shard, linear=linear
        ).loss

    def linear_statistics(self):
        arguments = self.hidden, self.weight, self.labels
        return hl.linear_vocab_statistics(
            *arguments, shard=self.shard, linear=hl.Linear(**self.keywords), options=self.options
        ).lse

    def topk(self):
        return hl.topk_log_probs(
            self.x, shard=self.shard, options=self.options, **({"k": 3} | self.keywords)
        ).log_probs

    def topk_of_hidden(self):
        return hl.topk_log_probs(
            self.hidden, 3, weight=self.weight, shard=self.shard, options=self.options
        ).log_probs

    def log_probs(self):
        return hl.log_probs(self.x, self.labels, shard=self.shard, options=self.options).log_prob

    def draw(self):
        """Sampled ids; the log-probs and sets are made of them."""
        given = {
            "seed": 5,
            "positions": torch.arange(N, device=self.x.device),
            "rule": RULE,
        } | self.keywords
        return hl.sample(
            self.x, shard=self.shard, transform=self.transform, options=self.options, **given
        ).ids

    def kept(self):
        rule = self.keywords.get("rule", RULE)
        return hl.kept_ids(
            self.x, rule, shard=self.shard, transform=self.transform, options=self.options
        ).ids

    def rows(self):
        """Rows of the weight; `select_rows` always compares."""
        ids = torch.arange(V // 2, device=self.weight.device)
        return hl.select_rows(self.weight, ids, shard=self.shard)

    def embed(self):
        """Rows of ids, which are the labels."""
        embedding = hl.VocabParallelEmbedding(
            H, self.shard, options=self.options, device=self.labels.device, **self.keywords
        )
        return embedding(self.labels)

    def rewrite(self, **fields):
        self.__dict__.update(fields)


def relabelled(call):
    call.labels = call.labels.clone()
    call.labels[2] += 1


def shared_inputs(call):
    """Of every rank: a policy gradient with a teacher and sequences."""
    device = call.labels.device
    call.terms = [hl.PolicyGradient("clip"), hl.Distillation(1.0, "forward_kl")]
    call.inputs = {
        "advantages": torch.ones(N, device=device),
        "old_log_prob": torch.full((N,), -2.0, device=device),
        "sequences": hl.Sequences.from_ids(
            torch.arange(N, device=device) // 2, 3, call.labels >= 0
        ),
        "teacher": hl.Teacher(torch.zeros_like(call.x)),
    }


def in_inference_mode(call):
    with torch.inference_mode():
        call.inputs["teacher"] = hl.Teacher(call.inputs["teacher"].logits.clone())


def bounds(start, stop):
    return lambda call: call.rewrite(
        shard=hl.VocabShard(start, stop, V, call.shard.group),
        x=torch.zeros(N, stop - start, device=call.x.device, requires_grad=True),
    )


def other_sequences(call):
    mask = torch.arange(N, device=call.labels.device) > 0
    ids = torch.arange(N, device=mask.device) // 2
    call.inputs = {**call.inputs, "sequences": hl.Sequences.from_ids(ids, 3, mask)}


def other_batch(call):
    """Labels and inputs of other tokens."""
    call.labels = call.labels.roll(1)
    call.inputs["advantages"] = -call.inputs["advantages"]


def other_ids_of_sequences(call):
    ids = torch.arange(N, device=call.labels.device) // 2
    ids[[1, 2]] = ids[[2, 1]]  # as many tokens each
    call.inputs = {**call.inputs, "sequences": hl.Sequences.from_ids(ids, 3, call.labels >= 0)}


def with_sets(*numbers):
    """A set statistic of sets that hold these ids and the labels."""

    def prepare(call):
        ids = torch.tensor(numbers, device=call.labels.device).expand(N, -1)
        ids = torch.cat([ids, call.labels[:, None]], 1)
        call.keywords.update(want=("set_log_prob",), sets=hl.IdSets(ids))

    return prepare


def rule_of(**values):
    """A rule with values per token."""
    return lambda c: c.keywords.update(
        rule=hl.SamplingRule(
            **{name: torch.full((N,), x, device=c.x.device) for name, x in values.items()}
        )
    )


def clipped(bound):
    """A policy gradient with this clip, and its inputs."""

    def prepare(call):
        shared_inputs(call)
        call.inputs = {name: call.inputs[name] for name in ("advantages", "old_log_prob")}
        call.terms = [hl.PolicyGradient("clip", clip=(bound, bound))]

    return prepare


def under_autocast(method):
    """A call whose GEMM has operands in bf16."""

    def spoil(call):
        autocast = torch.autocast(call.x.device.type, torch.bfloat16)
        call.rewrite(**{method: autocast(getattr(call, method))})

    return spoil


def term_of(function):
    return lambda call: call.rewrite(terms=[hl.Term("mine", function)])


def scaled(factors, stats):
    return len(factors) * stats.lse


def scaled_twice(factors, stats):
    return 2.0 * scaled(factors, stats)


def mine(factor, stats):
    return {"mine": factor * stats.lse}


# name -> (method, what every rank prepares, what only the last one does, the exception, words of
# its message)
CASES = {
    "labels of another dtype": ("statistics", None, lambda c: c.rewrite(labels=c.labels.float()), "TypeError", "int64"),
    "one label too few": ("statistics", None, lambda c: c.rewrite(labels=c.labels[1:]), "ValueError", "shape [6]"),
    "labels of other values": (
        "statistics", None, relabelled, "ValueError", "shard= has the data-parallel group",
    ),
    "logits without a gradient": ("head", None, lambda c: c.rewrite(x=c.x.detach()), "ValueError", "s.requires_grad"),
    "no labels": ("statistics", None, lambda c: c.rewrite(labels=None), "ValueError", "labels"),
    "a token too few": (
        "statistics", None, lambda c: c.rewrite(x=c.x[1:], labels=c.labels[1:]), "ValueError", "labels"),
    "logits of another dtype": (
        "statistics", None, lambda c: c.rewrite(x=c.x.detach().bfloat16()), "ValueError", "torch.float32 [6]"),
    "logits of another width": ("statistics", None, lambda c: c.rewrite(x=c.x[:, 1:]), "ValueError", "columns"),
    "another statistic": (
        "statistics", None, lambda c: c.keywords.update(want=("entropy",)), "ValueError", "('entropy',)"),
    "an unknown statistic": ("statistics", None, lambda c: c.keywords.update(want=("mode",)), "ValueError", "['mode']"),
    "another transport": (
        "statistics", None, lambda c: c.rewrite(options=hl.Options(transport="sum", validate="full")),
        "ValueError", "transport"),
    "another temperature": (
        "statistics", None, lambda c: c.rewrite(transform=hl.Transform(temperature=2.0)), "ValueError", "temperature"),
    "another ignore_index": (
        "statistics", None, lambda c: c.keywords.update(ignore_index=-1), "ValueError", "ignore_index"),
    "no gradients": (
        "statistics", None, lambda c: c.rewrite(statistics=torch.no_grad()(c.statistics)), "ValueError", "grad_en"),
    "shards that overlap": (
        "statistics", None, lambda c: bounds(c.shard.start - 1, V)(c), "ValueError", "cover [0, 128) once"),
    "shards with a gap": (
        "statistics", None, lambda c: bounds(c.shard.start + 1, V)(c), "ValueError", "cover [0, 128) once"),
    "bounds of its own": ("statistics", None, lambda c: bounds(c.shard.start, V)(c), "ValueError", "alike"),
    "another term's weight": ("head", None, lambda c: c.rewrite(terms=[hl.CrossEntropy(0.5)]), "ValueError", "weight"),
    "another term": (
        "head", None, lambda c: c.rewrite(terms=[hl.Entropy(1.0)]), "ValueError", "terms: rank 0 of the group has ['"),
    "one more term": (
        "head", None, lambda c: c.rewrite(terms=[hl.CrossEntropy(), hl.ZLoss(1e-4)]), "ValueError",
        "['cross_entropy'], got ['cross_entropy', 'z_loss'] on rank "),
    "another argument of a term": (
        "head", shared_inputs,
        lambda c: c.rewrite(terms=[c.terms[0], hl.Distillation(1.0, "forward_kl", temperature_squared=True)]),
        "ValueError", "terms.1.function of 'forward_kl'"),
    "another reduction": ("head", None, lambda c: c.keywords.update(reduction="sum"), "ValueError", "reduction"),
    "an input of other values": (
        "head", shared_inputs, lambda c: c.inputs.update(advantages=-c.inputs["advantages"]),
        "ValueError", "inputs.advantages"),
    "an input that is trained": (
        "head", shared_inputs, lambda c: c.inputs["advantages"].requires_grad_(), "ValueError", "requires_grad"),
    "another batch": ("head", shared_inputs, other_batch, "ValueError", "agree on labels: rank 0"),
    "a missing input": ("head", shared_inputs, lambda c: c.inputs.pop("advantages"), "ValueError", "missing ['adv"),
    "other sequences": ("head", shared_inputs, other_sequences, "ValueError", "inputs.sequences.mask"),
    "other ids of sequences": ("head", shared_inputs, other_ids_of_sequences, "ValueError", "inputs.sequences.ids"),
    "a teacher of another dtype": (
        "head", shared_inputs, lambda c: c.inputs.update(teacher=hl.Teacher(torch.zeros_like(c.x).half())),
        "ValueError", "inputs.teacher.logits"),
    "a teacher that autograd cannot save": (
        "head", shared_inputs, in_inference_mode, "ValueError",
        "agree on tensors of torch.inference_mode(): rank 0 of the group has '', got 'inputs.teacher.logits' on"),
    "another teacher": (
        "head", shared_inputs,
        lambda c: c.inputs.update(teacher=hl.TopKTeacher(c.labels[:, None], torch.zeros_like(c.x[:, :1].detach()))),
        "ValueError", "TopKTeacher"),
    "a weight of too few rows": ("linear_head", None, lambda c: c.rewrite(weight=c.weight[1:]), "ValueError", "weight"),
    "no main_grad": (
        "linear_head", lambda c: c.keywords.update(main_grad=True) or setattr(
            c.weight, "main_grad", torch.zeros(c.weight.shape, device=c.weight.device)),
        lambda c: delattr(c.weight, "main_grad"), "ValueError", "got None"),
    "another mode": ("linear_head", None, lambda c: c.keywords.update(mode="recompute"), "ValueError", "linear.mode"),
    "another budget": ("linear_head", None, lambda c: c.keywords.update(budget=1 << 20), "ValueError", "linear.budget"),
    "another hidden size": (
        "linear_statistics", None, lambda c: c.rewrite(hidden=c.hidden[:, 1:]), "ValueError", "weight must"),
    "another hidden_grad": (
        "linear_statistics", None, lambda c: c.keywords.update(hidden_grad="none"), "ValueError", "hidden_grad"),
    "another clip": (
        "head", clipped(0.2), clipped(0.3), "ValueError", "terms.0.function.arguments.1.clip"),
    "another objective": (
        "head", clipped(0.2), lambda c: c.rewrite(terms=[hl.PolicyGradient("cispo", name="clip", clip=(0.2, 0.2))]),
        "ValueError", "terms.0.function.arguments.0"),
    "another smoothing": (
        "head", lambda c: c.rewrite(terms=[hl.CrossEntropy(label_smoothing=0.1)]),
        lambda c: c.rewrite(terms=[hl.CrossEntropy(label_smoothing=0.2)]), "ValueError", "keywords.smoothing"),
    "another function": (
        "head", term_of(partial(scaled, (1,))), term_of(partial(scaled_twice, (1,))), "ValueError", "got scaled_twice"),
    "a function of another set": (
        "head", term_of(partial(scaled, {1, "5"})), term_of(partial(scaled, {1, "6"})), "ValueError", "arguments.0"),
    "a function of another array": (
        "head", term_of(partial(scaled, np.ones(2))), term_of(partial(scaled, np.zeros(2))),
        "ValueError", "arguments.0"),
    "a metric's other options": (
        "head", lambda c: c.keywords.update(metrics=[hl.Metric(partial(mine, 1.0))]),
        lambda c: c.keywords.update(metrics=[hl.Metric(partial(mine, 2.0))]), "ValueError", "token_metrics"),
    "hidden states of other values": (
        "linear_head", lambda c: c.rewrite(options=hl.Options(validate="checksums")),
        lambda c: c.rewrite(hidden=c.hidden + 1e-6), "ValueError", "hidden"),
    "a head's weight without a gradient": (
        "linear_head", None, lambda c: c.rewrite(weight=c.weight.detach()), "ValueError",
        "agree on weight.requires_grad: rank 0 of the group has True, got False"),
    "hidden states with a gradient": (
        "linear_head", None, lambda c: c.rewrite(hidden=c.hidden.clone().requires_grad_()), "ValueError",
        "hidden.requires_grad"),
    "autocast of a linear head": (
        "linear_head", lambda c: c.rewrite(options=hl.Options(validate="checksums")), under_autocast("linear_head"),
        "ValueError", "agree on autocast: rank 0 of the group has None, got torch.bfloat16"),
    "autocast of a search": (
        "topk_of_hidden", None, under_autocast("topk_of_hidden"), "ValueError", "agree on autocast: rank 0"),
    "another nucleus": (
        "topk", lambda c: c.keywords.update(top_p=0.5), lambda c: c.keywords.update(top_p=0.6), "ValueError", "top_p"),
    "another type of ids": (
        "topk", None, lambda c: c.keywords.update(ids_dtype=torch.int32), "ValueError", "ids_dtype"),
    "another k": ("topk", None, lambda c: c.keywords.update(k=4), "ValueError", "k: rank 0"),
    "another seed": ("draw", None, lambda c: c.keywords.update(seed=6), "ValueError", "seed: rank 0"),
    "a seed that cannot be": ("draw", None, lambda c: c.keywords.update(seed=-1), "ValueError", "seed must be"),
    "other positions": (
        "draw", None, lambda c: c.keywords.update(positions=torch.arange(1, N + 1, device=c.x.device)),
        "ValueError", "positions: rank 0"),
    "positions of another dtype": (
        "draw", None, lambda c: c.keywords.update(positions=torch.arange(N, device=c.x.device).int()),
        "ValueError", "torch.int32 [6]"),
    "another top_p": (
        "draw", None, lambda c: c.keywords.update(rule=hl.SamplingRule(top_k=5, top_p=0.8)),
        "ValueError", "rule.top_p"),
    "no rule": ("draw", None, lambda c: c.keywords.update(rule=None), "ValueError", "rule: rank 0"),
    "no rule and one that keeps all": (
        "draw", lambda c: c.keywords.update(rule=hl.SamplingRule()), lambda c: c.keywords.update(rule=None),
        "ValueError", "rule: rank 0"),
    "a number as rule": ("draw", None, lambda c: c.keywords.update(rule=5), "TypeError", "a SamplingRule, got int"),
    "other values per token in a rule": (
        "kept", rule_of(min_p=0.1), rule_of(min_p=0.2), "ValueError", "rule.min_p"),
    "a number as rule of kept ids": ("kept", None, lambda c: c.keywords.update(rule=5), "TypeError", "got int"),
    "another temperature of samples": (
        "kept", None, lambda c: c.rewrite(transform=hl.Transform(temperature=2.0)), "ValueError", "temperature"),
    "kept ids and a draw": ("kept", None, lambda c: c.rewrite(kept=c.draw), "ValueError", "call"),
    "sets of other ids": ("statistics", with_sets(1, 2), with_sets(1, 3), "ValueError", "sets.ids"),
    "ids of other values": ("embed", None, relabelled, "ValueError", "ids: rank 0"),
    "ids of another dtype": ("embed", None, lambda c: c.rewrite(labels=c.labels.float()), "TypeError", "int64"),
    "an id too few": ("embed", None, lambda c: c.rewrite(labels=c.labels[1:]), "ValueError", "ids: rank 0"),
    "rows of a part of the sequence": (
        "embed", lambda c: c.rewrite(labels=c.labels[:4]), lambda c: c.keywords.update(sequence_parallel=True),
        "ValueError", "sequence_parallel"),
    "another call": ("topk", None, lambda c: c.rewrite(topk=c.statistics), "ValueError", "call"),
}  # fmt: skip


def case_run(group, device, name):
    method, prepare, spoil, *_ = CASES[name]
    call = Call(group, device)
    if prepare is not None:
        prepare(call)
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        spoil(call)
    dist.barrier(group)  # NCCL connects in a group's first collective, which is not what is timed
    begin = time.monotonic()
    try:
        getattr(call, method)()
    except (ValueError, TypeError) as error:
        return Failure(type(error).__name__, str(error), ""), time.monotonic() - begin


@pytest.mark.parametrize("name", CASES)
def test_a_group_of_one_has_nobody_to_compare_with(name):
    """Results and errors are those of the same call without full validation."""
    full, plain = on_a_group_of_one(alone_run, name)
    assert full == plain


def alone_run(group, device, name):
    return [outcome(group, device, name, validate) for validate in ("full", "metadata")]


def outcome(group, device, name, validate):
    """The result of a spoiled call as text, or its error."""
    method, prepare, spoil, *_ = CASES[name]
    torch.manual_seed(0)
    call = Call(group, device)
    try:
        for change in (prepare, spoil):
            if change is not None:
                change(call)
        call.options = replace(call.options, validate=validate)
        result = getattr(call, method)()
        return str(result if result is None else result.tolist())
    except (ValueError, TypeError) as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_mistake_on_one_rank_is_the_same_exception_on_all(name, world_size):
    results = on_ranks(world_size, case_run, name)
    assert all(results), "a rank noticed nothing"
    kind, words = CASES[name][3:]
    for failure, seconds in results:
        assert failure == results[0][0] and failure.kind == kind and words in failure.message, (
            failure
        )
        named = f"rank {world_size - 1}", f"ranks [{world_size - 1}]"
        assert any(words in failure.message for words in named) or "cover" in failure.message
        assert seconds < TIMEOUT


def agreeing_run(group, device, method):
    results = []
    for options in (FULL, hl.Options()):
        torch.manual_seed(0)
        call = Call(group, device)
        call.options = options
        if method == "head":
            shared_inputs(call)
        results.append(getattr(call, method)().detach().cpu())
    return results


# of checks that exchange as well, which come after the agreement
CHECKED = hl.Options(check=True, validate="full")
PUBLIC = (
    "statistics", "log_probs", "head", "linear_head", "linear_statistics", "topk",
    "topk_of_hidden", "draw", "kept", "embed",
)  # fmt: skip


def checked_pair_run(group, device, pair, tokens):
    """Each rank makes its own of two calls, of its own number of tokens."""
    is_last = dist.get_rank(group) == dist.get_world_size(group) - 1
    call, count = Call(group, device), tokens[is_last]
    call.rewrite(
        options=CHECKED,
        labels=call.labels[:count],
        hidden=call.hidden[:count],
        x=call.x.detach()[:count].requires_grad_(),
        draw=partial(draw_of, call, count),
    )
    return error_of(getattr(call, pair[is_last]))


def draw_of(call, count):
    positions = torch.arange(count, device=call.x.device)
    call.keywords["positions"] = positions
    return Call.draw(call)


@pytest.mark.parametrize("pair", combinations(PUBLIC, 2), ids="-".join)
def test_other_calls_of_checked_options_are_the_same_exception_on_all(pair):
    first, last = on_ranks(2, checked_pair_run, pair, (N, N))
    assert first == last and first.startswith("ValueError: ranks must agree on ")


@pytest.mark.parametrize("name", PUBLIC)
def test_other_tokens_of_checked_options_are_the_same_exception_on_all(name):
    first, last = on_ranks(2, checked_pair_run, (name, name), (N, N - 2))
    assert first == last and first.startswith("ValueError: ranks must agree on ")


METHODS = "statistics", "head", "linear_head", "linear_statistics", "topk", "draw", "kept", "rows"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_that_agree_get_what_they_get_without(method, world_size):
    for full, plain in on_ranks(world_size, agreeing_run, method):
        assert torch.equal(full, plain)


@pytest.mark.parametrize("method", METHODS)
def test_a_group_of_one_gets_what_one_rank_gets(method):
    full, plain = on_a_group_of_one(agreeing_run, method)
    (alone, _) = on_ranks(1, agreeing_run, method)[0]
    assert torch.equal(full, plain) and torch.equal(full, alone)


def test_the_same_mistake_on_all_ranks_keeps_its_message():
    plain = on_ranks(2, everywhere_run, "metadata", failures=True)
    full = on_ranks(2, everywhere_run, "full", failures=True)
    assert [f.message for f in plain] == [f.message for f in full] and "got torch.float32" in full[
        0
    ].message


def everywhere_run(group, device, validate):
    call = Call(group, device)
    call.rewrite(labels=call.labels.float(), options=hl.Options(validate=validate))
    call.statistics()


def test_full_validation_is_refused_under_compile():
    compiled = torch.compile(
        lambda x: hl.vocab_statistics(x, options=FULL).lse,
        backend="eager",
        fullgraph=True,
        dynamic=False,
    )
    with pytest.raises(Exception, match="validate='full' is for eager"):
        compiled(torch.zeros(2, 4))


def compiled_run(group, device, call):
    """Eager, and through torch.compile without fullgraph, which breaks the graph."""
    results = []
    for function in (getattr(Call, call), torch.compile(getattr(Call, call), backend="eager")):
        torch.manual_seed(0)
        problem = Call(group, device)
        result = function(problem)
        result.sum().backward()
        results.append(
            [result.detach(), (problem.weight if problem.x.grad is None else problem.x).grad]
        )
    return results


@pytest.mark.parametrize("call", ["statistics", "head", "linear_head"])
def test_full_validation_without_fullgraph_runs_in_eager(call):
    for eager, compiled in on_ranks(2, compiled_run, call):
        assert all(map(torch.equal, eager, compiled))


class exit(Exception):
    """An exception of a name that builtins know."""


def undecodable_run(group, device, kind):
    call = Call(group, device)
    if dist.get_rank(group) == 1:
        call.rewrite(options=FULL, labels=Raising(exit("now") if kind == "exit" else b"\xff"))
    try:
        call.statistics()
    except Exception as error:
        return type(error).__name__, str(error)


class Raising:
    """Labels that raise when they are looked at."""

    def __init__(self, what):
        self.what = what

    def __getattr__(self, name):
        what = self.__dict__["what"]
        if isinstance(what, bytes):
            what.decode()
        raise what


@pytest.mark.parametrize(
    "kind, name", [("exit", "exit: now"), ("unicode", "UnicodeDecodeError: 'utf-8' codec can't")]
)
def test_an_exception_that_is_not_known_is_a_runtime_error_that_names_it(kind, name):
    here, there = on_ranks(2, undecodable_run, kind)
    for found, message in (here, there):
        assert found == "RuntimeError" and f"on rank 1 of the group: {name}" in message


def other_version_run(group, device, known):
    """A call of ranks of two versions, of which the last one's says no version unless `known`."""
    call, is_last = Call(group, device), dist.get_rank(group) == dist.get_world_size(group) - 1
    version = mock.patch.object(agreement, "__version__", "0.2.0" if is_last else "0.3.0")
    alike = mock.Mock(return_value={"weight": (8, 1)})
    own = mock.patch.object(agreement, "checksums_of_own_ids", alike)
    with version, own:
        if is_last and not known:
            exchange = agreement.gather_objects

            def as_before(facts, group):
                own, error = facts
                return exchange(({"call": own["call"]}, error), group)

            with mock.patch.object(agreement, "gather_objects", as_before):
                return error_of(call.statistics)
        return error_of(call.statistics)


def another_exchange(group, device, sent):
    """A rank that leaves the call out, and gathers something of its own."""
    call = Call(group, device)
    if group.rank() == 0:
        return error_of(call.statistics)
    dist.all_gather_object([None] * group.size(), sent, group=group)


@pytest.mark.parametrize("sent", ["a log line", ("loss", []), 3, None])
def test_what_a_rank_gathers_by_itself_is_told_from_a_call(sent):
    found, _ = on_ranks(2, another_exchange, sent)
    assert found is not None and found.startswith("RuntimeError: all ranks of the group must make")
    assert f"got an object of another exchange, {type(sent).__name__}, of rank 1" in found


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("known", [True, False])
def test_ranks_of_two_versions_are_told_so_before_anything_else_is_compared(known):
    here, there = on_ranks(2, other_version_run, known)
    other = "0.2.0" if known else "an older one"
    assert here == there
    assert here == (
        "ValueError: all ranks of the group must have the same version of tp_headloss, got 0.3.0 on "
        f"ranks [0] and {other} on ranks [1]"
    )


def alike_run(group, device):
    """A term's constants that have no values to compare, or values of each rank's own: the same on
    all ranks."""
    model = torch.nn.Linear(2, 2)  # drawn by each rank for itself
    shard = hl.VocabShard.from_group(group, V)
    constants = {
        Call: 1,
        mine: 2,
        object(): 3,
        "others": (object(), {mine}, model, shard, torch.eye(2).to_sparse()),
    }
    call = Call(group, device)
    call.rewrite(
        terms=[hl.Term("mine", partial(scaled, constants)), hl.Term("other", lambda s: s.lse)]
    )
    return float(call.head())


def test_functions_that_are_alike_on_all_ranks_agree():
    first, second = on_ranks(2, alike_run)
    assert first == second


# what the last rank has of its own -> what happens without full validation to the loss of a linear
# head, as docs/limits.md says: NaN for a token, nothing, or a number of its own
UNNOTICED = {
    "an ignore_index that a label is": ({"ignore_index": 5}, "NaN"),
    "an ignore_index that no label is": ({"ignore_index": -7}, "nothing"),
    "a vocab_size that a label shows": ({"vocab_size": V - 1}, "NaN"),
    "a vocab_size that no label shows": ({"vocab_size": V - 2, "last": 7}, "equal numbers"),
    "hidden states of other values": ({"hidden": 1.0}, "equal numbers"),
    "a softcap": ({"softcap": 3.0}, "equal numbers"),
    "a weight of a term": ({"weight": 2.0}, "its own number"),
    "another objective": ({"policy": hl.PolicyGradient("reinforce")}, "its own number"),
    "another clip": ({"policy": hl.PolicyGradient(clip=(0.1, 0.1))}, "its own number"),
    "a rollout_weight": ({"policy": hl.PolicyGradient(rollout_weight=True)}, "its own number"),
    "another reduction": ({"reduction": "sum"}, "its own number"),
    "the weight of another rank": ({"swapped": True}, "equal numbers"),
}


def unnoticed(group, device, own, options, mode):
    own = {"last": own.get("last", V - 1)} | (own if group.rank() == group.size() - 1 else {})
    shard = hl.VocabShard.from_group(group, own.get("vocab_size", V), padded_size=V)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(V, H, generator=generator)
    rows = rows.roll(V // 2 if own.get("swapped") else 0, 0)
    weight = rows[shard.start : shard.stop].to(device)
    hidden = (torch.randn(N, H, generator=generator) + own.get("hidden", 0.0)).to(device)
    labels = torch.tensor([5, 6, 7, 8, 9, own["last"]], device=device)
    policy = own.get("policy", hl.PolicyGradient())
    head_loss = hl.HeadLoss(
        [hl.CrossEntropy(own.get("weight", 1.0)), policy],
        ignore_index=own.get("ignore_index", -100),
        reduction=own.get("reduction", "mean"),
        options=options,
    )
    call = {"shard": shard, "transform": hl.Transform(softcap=own.get("softcap"))}
    given = {"advantages": 1.0, "old_log_prob": -8.0, "rollout_weight": 0.5}
    call["inputs"] = {name: torch.full((N,), given[name], device=device) for name in policy.inputs}
    call["linear"] = hl.Linear(mode)
    out = head_loss.linear(hidden, weight, labels, **call)
    return float(out.loss), int(out.stats.log_prob.isnan().sum())


@pytest.mark.parametrize("mode", ["one_sweep", "recompute"])
@pytest.mark.parametrize("name", UNNOTICED)
def test_what_differs_by_rank_is_noticed_where_the_page_says_so(name, mode):
    own, happens = UNNOTICED[name]
    expected = on_ranks(2, unnoticed, {"last": own.get("last", V - 1)}, None, mode)[0]
    (first, nan), (last, other_nan) = on_ranks(2, unnoticed, own, None, mode)
    assert nan == other_nan == (happens == "NaN")
    if happens != "NaN":
        assert (first == last) == (happens != "its own number")
        assert ((first, nan) == expected) == (happens in ("nothing", "its own number"))
    checked = on_ranks(2, unnoticed, own, hl.Options(check=True), mode, failures=True)
    assert {isinstance(x, Failure) for x in checked} == {happens == "NaN"}
    validate = "checksums" if "hidden" in own else "full"
    options = hl.Options(validate=validate)
    full = on_ranks(2, unnoticed, own, options, mode, failures=True)
    assert {x.kind for x in full} == {"ValueError"} and len({x.message for x in full}) == 1


def other_statistics(group, device, own, validate):
    """One statistic of each rank's own, of as many numbers as the other's -> its name and values."""
    shard = hl.VocabShard.from_group(group, V)
    x = torch.randn(N, V, generator=torch.Generator().manual_seed(0)).to(device)
    here = x[:, shard.start : shard.stop].clone().requires_grad_()
    name = own[group.rank()]
    options = hl.Options(validate=validate)
    stats = hl.vocab_statistics(here, shard=shard, want=(name,), options=options)
    return name, getattr(stats, name).detach().cpu()


def test_other_statistics_of_as_many_numbers_are_plausible_and_wrong_as_the_page_says():
    names = "entropy", "collision"
    right = {
        name: values
        for own in names
        for name, values in on_ranks(2, other_statistics, (own, own), "metadata")
    }
    for name, values in on_ranks(2, other_statistics, names, "metadata"):
        assert values.isfinite().all() and not torch.allclose(values, right[name], rtol=0.01)
    found = on_ranks(2, other_statistics, names, "full", failures=True)
    assert {x.kind for x in found} == {"ValueError"} and len({x.message for x in found}) == 1


# what a term reads of its rank -> its function
OF_A_RANK = {
    "a number that it closes over": lambda stats, rank, own: (1 + rank) * -stats.log_prob,
    "its own columns": lambda stats, rank, own: own.amax(-1) - stats.log_prob,
    "an error": lambda stats, rank, own: -stats.log_prob if rank == 0 else stats.log_prob @ own[0],
    "nothing": lambda stats, rank, own: -stats.log_prob,
}


def values_of_each_rank(group, device, case, call, validate, part="terms"):
    """The loss of a term, or the sum of a metric, that reads something of its rank."""
    shard = hl.VocabShard.from_group(group, V)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator).to(device)
    rows = torch.randn(V, H, generator=generator).to(device)
    weight = rows[shard.start : shard.stop].clone().requires_grad_()
    logits, rank = hidden @ weight.T, group.rank()
    function = lambda stats: OF_A_RANK[case](stats, rank, logits)  # noqa: E731
    options = hl.Options(validate=validate)
    if part == "metrics":
        metric = hl.Metric(lambda stats: {"mine": function(stats).detach()})
        head_loss = hl.HeadLoss(metrics=metric, options=options)
    else:
        head_loss = hl.HeadLoss([hl.ZLoss(1e-3), hl.Term("mine", function)], options=options)
    labels = torch.arange(N, device=device)
    if call == "logits":
        out = head_loss(logits, labels, shard=shard)
    else:
        out = head_loss.linear(hidden, weight, labels, shard=shard)
    out.loss.backward()
    return float(out.metrics["mine"] if part == "metrics" else out.loss)


@pytest.mark.parametrize("call", ["logits", "hidden states"])
@pytest.mark.parametrize("case", ["a number that it closes over", "its own columns", "nothing"])
def test_full_validation_compares_what_terms_return(case, call):
    plain = on_ranks(2, values_of_each_rank, case, call, "metadata")
    assert (plain[0] == plain[1]) == (case == "nothing")
    full = on_ranks(2, values_of_each_rank, case, call, "full", failures=True)
    if case == "nothing":
        assert full == plain
        return
    assert {x.kind for x in full} == {"ValueError"} and len({x.message for x in full}) == 1
    words = "term 'mine' must have equal values on all ranks of the shard's group, got "
    assert words in full[0].message and "on rank 1 (sums over tokens)" in full[0].message


def test_full_validation_compares_what_metrics_return():
    case = "a number that it closes over"
    full = on_ranks(2, values_of_each_rank, case, "logits", "full", "metrics", failures=True)
    assert all("metric 'mine' must have equal values" in x.message for x in full)
    assert len({x.message for x in full}) == 1


def metrics_of_each_rank(group, device):
    shard = hl.VocabShard.from_group(group, V)
    logits = torch.zeros(N, shard.width, device=device)
    metric = hl.Metric(lambda stats: {f"of {group.rank()}": stats.lse})
    head_loss = hl.HeadLoss(metrics=metric, options=hl.Options(validate="full"))
    head_loss(logits, torch.arange(N, device=device), shard=shard)


def test_full_validation_compares_the_names_of_metrics():
    for x in on_ranks(2, metrics_of_each_rank, failures=True):
        assert "metrics must be the same on all ranks, got " in x.message
        assert "\"metric 'of 0'\"] on rank 0 and " in x.message


def test_an_error_of_a_term_on_one_rank_is_the_same_exception_on_all():
    full = on_ranks(2, values_of_each_rank, "an error", "logits", "full", failures=True)
    assert {x.kind for x in full} == {"RuntimeError"}
    assert "on rank 1 of the group: " in full[0].message


def trained_on_one_rank(group, device, held):
    """A linear head whose term reads something that requires a gradient on the last rank alone."""
    call, is_last = Call(group, device), group.rank() == group.size() - 1
    scale = torch.ones((), device=device, requires_grad=is_last)
    module = torch.nn.Linear(1, 1).requires_grad_(is_last).to(device)
    functions = {
        "a tensor": lambda stats: -scale * stats.log_prob,
        "a module": lambda stats: -(module.weight.sum() * 0 + 1) * stats.log_prob,
    }
    call.rewrite(terms=[hl.Term("mine", functions[held], tokenwise=True)])
    return error_of(call.linear_head)


@pytest.mark.parametrize("held, name", [("a tensor", "scale"), ("a module", "module")])
def test_what_a_term_reads_and_one_rank_trains_is_the_same_exception_on_all(held, name):
    first, last = on_ranks(2, trained_on_one_rank, held)
    assert first == last
    assert first.startswith(
        f"ValueError: ranks must agree on terms.0.function.{name}.requires_grad"
    )
