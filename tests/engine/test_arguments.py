"""Wrong arguments are named, wrong types say what to do, and every option changes something."""

import gc
import math
import re
import warnings
import weakref

import numpy as np
import pytest
import torch
from logits_problem import N, V, rows

import tp_headloss as hl
from tp_headloss.integrations.sampling_masks import from_vllm
from tp_headloss.integrations.verl import logits_processor

X, LABELS = rows("cpu")
IDS, SHARD = torch.zeros(1).long(), hl.VocabShard(0, V, V)
ROW, STATES, WEIGHT = torch.zeros(1, V), torch.zeros(1, 8), torch.zeros(V, 8)
SETS = hl.IdSets(torch.zeros(2, 3, 4).long())
FEW, MASK = hl.Linear(max_valid_tokens=1), LABELS[None] > 0
CHECK, FORWARD = hl.Options(check=True), hl.Options(gradient="forward")


class DeviceMesh:
    """Stands for torch's, which needs a process group."""


def _numbered(stats):
    return {3: stats.lse}


def with_head(*terms, metrics=(), **given):
    return hl.HeadLoss(terms or None, metrics=metrics)(ROW, IDS, **given)


# What tests/helpers/odd_inputs.py and tests/promises/test_spec.py have not: relations, and what a
# message advises.
TYPES = {
    "got torch.float32 .are logits and labels swapped": lambda: hl.CausalLMLoss()(LABELS, X),
    "teacher.weight must be a tensor, got Linear: pass its .weight": lambda: (
        hl.linear_vocab_statistics(
            X,
            torch.zeros(9, V),
            want=("forward_kl",),
            teacher=hl.TeacherHead(X, torch.nn.Linear(V, 9)),
        )
    ),
    "a list of ids per token, got one of 1, ..": lambda: from_vllm([[1, 2, 3]]),
    "a list of ids per token, got 1": lambda: from_vllm([1, 2, 3]),
    "a list of ids per token, got None": lambda: from_vllm([None]),
    "terms must be Terms, got 'z_loss'": lambda: hl.HeadLoss("z_loss"),
    "terms must be Terms, got dict": lambda: hl.HeadLoss({"ce": hl.CrossEntropy()}),
    "metrics must be names or Metrics, got NoneType": lambda: hl.HeadLoss(metrics=None),
    "call it, PolicyMetrics": lambda: hl.HeadLoss(metrics=(hl.PolicyMetrics,)),
    r"'clip' takes the options \['clip', 'dual_clip', .* got \['eps'\]": lambda: hl.PolicyGradient(
        "clip", eps=0.2
    ),
    r"KLToReference takes the options .* got \['clamp'\]": lambda: hl.KLToReference(0.1, clamp=3),
    "labels must be a tensor, got ndarray: pass torch.from_numpy": lambda: hl.HeadLoss()(
        ROW, IDS.numpy()
    ),
    "scalar tensor, got ndarray: pass torch.from_numpy": lambda: hl.HeadLoss()(
        ROW, IDS, denominator=IDS.numpy()
    ),
    "got the class float16: write torch.float16": lambda: hl.topk_log_probs(
        ROW, 2, dtype=np.float16
    ),
    "dtype must be a dtype, got str: write torch.bfloat16": lambda: hl.topk_log_probs(
        ROW, 2, dtype="torch.bfloat16"
    ),
    "DType: write torch.int32": lambda: hl.topk_log_probs(ROW, 2, ids_dtype=np.dtype("int32")),
    # which is float64 to NumPy and float32 to torch
    "dtype must be a dtype, got str$": lambda: hl.topk_log_probs(ROW, 2, dtype="float"),
    "got logits, seed: write sample.* that no other draw": lambda: hl.sample(ROW, seed=0),
    "got a DeviceMesh: pass mesh.get_group": lambda: hl.VocabShard.from_group(DeviceMesh(), V),
    "mesh must be a torch.distributed.Dev": lambda: hl.VocabShard.from_mesh("tp", V),
    "parts must be a tuple or list, got dict": lambda: hl.combine_metrics({"a": X}),
    "metric 'a' must be a tensor, got int": lambda: hl.combine_metrics([{"a": 1}]),
    "per_sequence must be a tensor, got float": lambda: hl.Sequences.from_mask(MASK).spread(3.0),
    r"wrap it, Metric\(function\)": lambda: hl.HeadLoss(metrics=[lambda stats: {}]),
    r"must be a list of IdSets, got \['IdSets', 'Tensor'\]": lambda: hl.IdSets.cat(
        [SETS, torch.zeros(1)]
    ),
    "where must be bool, got torch.int64": lambda: SETS.scatter(torch.ones(6).long()),
    "labels must be int64 or int32": lambda: SETS.contains(torch.zeros(2, 3)),
    "head_loss must be": lambda: hl.VocabParallelHead(8, SHARD)(
        STATES, IDS, head_loss=hl.ZLoss(1.0)
    ),
    "transform must be a Transform, got float": lambda: hl.VocabParallelHead(8, SHARD)(
        STATES, IDS, transform=0.7
    ),
    "pass its .weight": lambda: hl.VocabParallelHead(8, SHARD, weight=torch.nn.Linear(8, V)),
    "want must be a tuple of names, got Tensor": lambda: hl.vocab_statistics(
        ROW, want=torch.tensor(0.5)
    ),
    "parameters must be tensors, got int": lambda: hl.clip_grad_norm_(3, 1.0),
    "temperature must be a number, got .1.0.": lambda: logits_processor(None, V)(
        ROW, IDS, temperature=[1.0]
    ),
    "temperature must be real numbers, got torch.bool": lambda: logits_processor(None, V)(
        ROW, IDS, IDS.bool()
    ),
    "temperature must be real numbers, got torch.complex": lambda: logits_processor(None, V)(
        ROW, IDS, 1j * ROW[0]
    ),
    "hidden states must be a dense": lambda: hl.HeadLoss().linear(STATES.to_sparse(), WEIGHT, IDS),
    "weight must be a dense tensor": lambda: hl.HeadLoss().linear(STATES, WEIGHT.to_sparse(), IDS),
    "must be an nn.Parameter, or n": lambda: hl.VocabParallelHead(8, SHARD, weight=WEIGHT),
    "bias must be a tensor, got float: a temperature is": lambda: hl.Transform(0.7),
    "must have one dtype, got": lambda: hl.topk_log_probs(STATES, 2, weight=WEIGHT.half()),
    "logits must be a tensor": lambda: hl.CausalLMLoss()([[0.0]], IDS, token_weight=torch.ones(1)),
    "labels must be a tensor": lambda: hl.linear_vocab_statistics(STATES, WEIGHT, [1], linear=FEW),
    "teacher must be `T.* got 'x'": lambda: hl.linear_vocab_statistics(
        STATES, WEIGHT, IDS, teacher="x", linear=FEW
    ),
    r"take \(stats, rewards\), got \(stats\)": lambda: hl.Term(
        "mine", lambda stats: stats.lse, inputs=("rewards",)
    ),
    r"a metric must name its values by strings, not empty, got \[3\]": lambda: with_head(
        metrics=hl.Metric(_numbered)
    ),
    r"got TopK: TopKTeacher\(top.ids, top.log_probs\)": lambda: hl.vocab_statistics(
        ROW, want=("topk_forward_kl",), teacher=hl.topk_log_probs(ROW, 2)
    ),
    "'advantages' must be a tensor, got LogProbs: pass its .log_prob": lambda: with_head(
        hl.PolicyGradient("reinforce"), inputs={"advantages": hl.log_probs(ROW, IDS)}
    ),
}
VALUES = {
    rf"k must be in \[1, {V}\], got {V + 1}: are these logits one rank's": lambda: (
        hl.topk_log_probs(X, V + 1)
    ),
    "is the weight one rank's rows": lambda: hl.topk_log_probs(STATES, V + 1, weight=WEIGHT),
    rf"ids must be in .* got \[{V}\]: is the weight one rank's rows": lambda: hl.select_rows(
        WEIGHT, torch.tensor([0, V])
    ),
    r"ids must be in .* got \[-1\]$": lambda: hl.select_rows(WEIGHT, torch.tensor([-1, 0])),
    r"of one-hot labels pass their .argmax\(-1\)": lambda: hl.HeadLoss()(ROW, ROW.long()),
    rf"\[1\] to fit labels, got \[1, {V}\]: of the logits of its own model pass log_probs\(": lambda: (
        with_head(hl.KLToReference(1.0), inputs={"reference_log_prob": ROW})
    ),
    "scale / temperature": lambda: hl.vocab_statistics(
        X, transform=hl.Transform(scale=1e30, temperature=1e-30)
    ),
    "student_temperature must be": lambda: hl.vocab_statistics(
        X,
        want=("forward_kl",),
        transform=hl.Transform(temperature=1e30),
        teacher=hl.Teacher(X, 1.0, 1e-30),
    ),
    "is vocab_size=1000 ri": lambda: hl.vocab_statistics(X[:, 1:], shard=SHARD),
    "padded_size=1024": lambda: hl.vocab_statistics(torch.zeros(N, V + 24), shard=SHARD),
    r"\[1000, 9\] to fit the shard and hidden states, got \[1000, 8\]": lambda: (
        hl.VocabParallelHead(8, SHARD)(ROW[:, :9])
    ),
    "for statistics alone, use vocab_statistics or linear": lambda: hl.HeadLoss()(X, None),
    r"labels must have shape \[S\], got \[\]": lambda: hl.CausalLMLoss()(X[0], LABELS[0]),
    r"labels must have shape \[S\], got": lambda: hl.multi_token_targets(LABELS[0], 1),
    "token_weight must have shape": lambda: hl.CausalLMLoss()(
        X, LABELS, token_weight=torch.tensor(1.0)
    ),
    "must be in the range of int64, got 9223": lambda: hl.multi_token_targets(
        LABELS, 1, ignore_index=1 << 63
    ),
    "metrics must have distinct names, got .'accuracy', 'accuracy'.": lambda: hl.HeadLoss(
        metrics=("accuracy",) * 2
    ),
    "upstream must be other than 0 and finite in fp32, got 0": lambda: hl.Linear(upstream=0),
    "denominator must be at least 0 and a number that fp32 holds, got -1": lambda: with_head(
        denominator=-1
    ),
    "denominator must be at least 0 and a number that fp32 holds, got inf": lambda: with_head(
        denominator=math.inf
    ),
    "denominator must be at least 0 and a number that fp32 holds": lambda: with_head(
        denominator=10**400
    ),
    "weight must be finite in fp32, got 1000": lambda: hl.Term("mine", len, weight=10**400),
    "'target_logit', 'valid'\\) are always there": lambda: hl.vocab_statistics(
        ROW, want=("log_prob",)
    ),
    r"labels must have shape \[2, 3\] to fit the sets, got \[3\]": lambda: SETS.contains(
        torch.zeros(3).long()
    ),
    r"weight gets no gradient: pass weight.detach\(\); .* the function of a Term": lambda: hl.Term(
        "mine", len, torch.ones((), requires_grad=True)
    ),
    r"clip must be \(low, high\) with 0 <= low <= 1": lambda: hl.PolicyGradient(
        "clip", clip=(-0.2, 0.2)
    ),
    r"got \(0.8, 1.28\), which look like bounds of the ratio r": lambda: hl.PolicyGradient(
        "clip", clip=(0.8, 1.28)
    ),
    r"dual_clip must be at least 1 \+ 0.2, .* got 1.1": lambda: hl.PolicyGradient(
        "clip", dual_clip=1.1
    ),
    "dual_clip must be at least 1 \\+ 0.2, where the clip ends, got 0.1": lambda: hl.PolicyMetrics(
        dual_clip=0.1
    ),
    "gradient='forward' is for logits": lambda: hl.linear_vocab_statistics(
        STATES, WEIGHT, options=FORWARD
    ),
    r"are these logits one rank's columns\? Then pass": lambda: hl.vocab_statistics(
        X[:, :4], LABELS, options=CHECK
    ),
}


@pytest.mark.parametrize("words", [*TYPES, *VALUES])
def test_wrong_arguments_are_named_and_the_message_says_what_to_do(words):
    kind, call = (TypeError, TYPES[words]) if words in TYPES else (ValueError, VALUES[words])
    with pytest.raises(kind, match=words):
        call()


def test_swapped_hidden_states_and_weight_are_named():
    hidden, weight, labels = torch.zeros(2, 8), torch.zeros(4, 8), torch.tensor([0, 1])
    with pytest.raises(
        ValueError,
        match=r"hidden states must be \[\*\[2\], H\] .* got \[4, 8\] .are hidden states and w",
    ):
        hl.HeadLoss().linear(weight, hidden, labels)
    with pytest.raises(ValueError, match="labels must have shape"):  # of other tokens
        hl.HeadLoss().linear(hidden, weight, torch.zeros(3).long())


def test_class_weights_are_a_copy_of_any_dtype():
    for dtype in (torch.float32, torch.float64):
        weight = torch.ones(V, dtype=dtype)
        term = hl.CrossEntropy(class_weight=weight)
        weight.zero_()
        assert term.class_weight.dtype == torch.float32 and (term.class_weight == 1).all()


def test_one_term_and_one_metric_need_no_list():
    head = hl.HeadLoss(hl.ZLoss(1.0), metrics="accuracy")
    assert [term.name for term in head.terms] == ["z_loss"] and head.metrics == ("accuracy",)
    head.metrics = hl.PolicyMetrics()
    assert head.input_names == {"advantages", "old_log_prob"}


def test_input_names_are_what_a_call_needs():
    own = hl.Term("soft", lambda stats, weights: -(weights * stats.log_probs_at).sum(-1), 1.0, ("log_probs_at",),
                  inputs=("weights",))  # fmt: skip
    head = hl.HeadLoss(
        [hl.PolicyGradient("reinforce", over="sets"), own], reduction="seq-mean-token-mean"
    )
    assert head.input_names == {"advantages", "sets", "ids", "weights", "sequences"}
    labels = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match=re.escape(f"inputs must be {sorted(head.input_names)}")):
        head(torch.zeros(1, 2, 4), labels, inputs={"sequences": hl.Sequences.from_mask(labels > 0)})


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    x, labels = rows("cpu")
    shard = hl.VocabShard.from_group(None, numpy.int64(V))
    transform = hl.Transform(temperature=numpy.float32(2.0), scale=numpy.float32(1.0))
    head = hl.HeadLoss([hl.CrossEntropy(numpy.float32(1.0))], ignore_index=numpy.int64(-100))
    ours = head(x, labels, shard=shard, transform=transform, denominator=numpy.int64(4)).loss
    assert torch.equal(
        ours, hl.HeadLoss()(x, labels, transform=hl.Transform(temperature=2.0), denominator=4).loss
    )


def test_a_call_after_an_equal_one_is_still_checked():
    """Checks are remembered by what they read, and neither attributes nor denominators are part of
    that."""
    x, labels = rows("cpu")
    head, whole = hl.HeadLoss(), hl.VocabShard(0, V, V)
    for _ in range(2):
        assert torch.equal(head(x, labels).loss, head(x, labels, shard=whole).loss)
    bad = {
        "width": (dict(logits=x[:, 1:], shard=whole), ValueError, "must have the shard's"),
        "logits": (dict(logits=x.long()), TypeError, "logits must be one of"),
        "labels": (dict(labels=labels.float()), TypeError, "labels must be int64 or int32"),
        "tokens": (dict(labels=labels[1:]), ValueError, "labels must have shape"),
        "shard": (dict(shard=V), TypeError, "shard must be a VocabShard"),
        "denominator": (
            dict(denominator=torch.ones(2)),
            ValueError,
            r"denominator must have shape \[\], got \[2\]",
        ),
        "meta": (
            dict(denominator=torch.ones((), device="meta")),
            ValueError,
            "denominator must be on .* got meta",
        ),
    }
    for kwargs, kind, match in bad.values():
        with pytest.raises(kind, match=match):
            head(**{"logits": x, "labels": labels, **kwargs})
    smaller = head(x, labels, shard=hl.VocabShard(0, V, V - 1))
    assert smaller.stats.vocab_size == V - 1 and head(x, labels).stats.vocab_size == V
    count = head(x, labels).count
    head.ignore_index = int(labels[labels >= 0][0])
    assert head(x, labels).count < count + (labels == -100).sum()  # and -100 is a bad label now


def test_inputs_of_a_call_after_an_equal_one_are_still_checked():
    x, labels = (y.view(2, -1, *y.shape[1:]) for y in rows("cpu"))
    old = torch.linspace(-5, -4, labels.numel()).view(labels.shape)
    term = hl.Term("gap", lambda stats, old: (stats.log_prob - old) ** 2, inputs=("old",))
    head = hl.HeadLoss([term])
    for mine in (old, old + 1, old[:, :1], old[0, 0], old[:1], old.double(), old):
        expected = hl.HeadLoss([term])(x, labels, inputs={"old": mine})
        assert torch.equal(head(x, labels, inputs={"old": mine}).loss, expected.loss)
        assert not torch.equal(expected.loss, head(x, labels, inputs={"old": 2 * mine}).loss)
    sequences = hl.Sequences.from_mask(labels >= 0)
    by_sequence = {"old": old[:, 0], "sequences": sequences}
    spread = {"old": old[:, :1].expand_as(old)}
    assert torch.equal(
        head(x, labels, inputs=by_sequence).loss, head(x, labels, inputs=spread).loss
    )
    bad = {
        "missing": ({}, ValueError, r"missing \['old'\]"),
        "another name": ({"new": old}, ValueError, r"missing \['old'\]; unused \['new'\]"),
        "one more": ({"old": old, "new": old}, ValueError, r"unused \['new'\]"),
        "a number": ({"old": 1.0}, TypeError, "input 'old' must be a tensor, got float"),
        "complex": ({"old": torch.complex(old, old)}, TypeError, "input 'old' must be real"),
        "meta": ({"old": old.to("meta")}, ValueError, "input 'old' must be on cpu"),
        "shape": ({"old": old[:, 1:]}, ValueError, "input 'old' must broadcast"),
        "a list": ([old], TypeError, "inputs must be a dict"),
    }
    for inputs, kind, match in bad.values():
        with pytest.raises(kind, match=match):
            head(x, labels, inputs=inputs)


def test_logits_whose_sign_is_not_in_memory(options, device):
    x, labels = rows(device)
    views = [torch.complex(torch.zeros_like(y), -y).conj().imag for y in (x, x.flip(0))]
    assert views[0].is_neg() and torch.equal(views[0], x)
    teachers = (hl.Teacher(x.flip(0)), hl.Teacher(views[1]))
    head = hl.HeadLoss([hl.CrossEntropy(), hl.Distillation()], options=options)
    losses = [head(y, labels, inputs={"teacher": t}).loss for y, t in zip((x, views[0]), teachers)]
    assert torch.equal(*losses)
    # strides of the view
    known, like = hl.HeadLoss(options=options), torch.complex(torch.zeros_like(x), x).imag
    assert like.stride() == views[0].stride() and not like.is_neg()
    assert torch.equal(*(known(y, labels).loss for y in (like, views[0])))


def test_want_is_a_tuple_of_names_that_have_a_field(device):
    x, labels = rows(device)
    weight = torch.eye(V, device=device)[:16]
    for call in (
        hl.vocab_statistics,
        lambda x, y, want: hl.linear_vocab_statistics(x, weight, y % 16, want=want),
    ):
        assert call(x, labels.clamp(min=0), want=(name for name in ["entropy"])).entropy is not None
        for want in ("entropy", [["entropy"]], None):
            with pytest.raises(TypeError, match="want must be a tuple of names"):
                call(x, labels.clamp(min=0), want=want)


def test_what_is_remembered_of_a_call_holds_none_of_its_tensors():
    x, labels = rows("cpu")
    head = hl.HeadLoss()
    head(x, labels)
    alive = weakref.ref(x), weakref.ref(labels)
    del x, labels
    gc.collect()
    assert [tensor() for tensor in alive] == [None, None]
    assert len(head._definition.plan.checked) == 1


def test_temperatures_that_are_none_are_nan(options, device):
    x, labels = (part[:3] for part in rows(device))
    transform = hl.Transform(temperature=torch.tensor([0.5, -0.5, 0.0], device=device))
    stats = hl.vocab_statistics(x, labels, transform=transform, options=options)
    assert stats.log_prob.isnan().tolist() == [False, True, True]


class Quantised(torch.Tensor):
    """A weight of int8 with one scale, as libraries of quantisation have them: a subclass without
    memory."""

    @staticmethod
    def __new__(cls, values, scale, dequantizes=True, requires_grad=False):
        settings = {"dtype": torch.float32, "device": values.device, "requires_grad": requires_grad}
        x = torch.Tensor._make_wrapper_subclass(cls, values.shape, **settings)
        x.values, x.scale, x.dequantizes = values, scale, dequantizes
        return x

    def dequantize(self):
        if not self.dequantizes:
            raise NotImplementedError
        return self.values * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


class Doubled(torch.Tensor):
    """A subclass that stands for other values than its memory, by what functions make of it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(torch.Tensor):
    """A subclass whose memory is a tensor's own."""


def test_subclasses_are_what_they_stand_for_or_refused(device):
    hidden, labels = (
        torch.randn(6, 8, device=device, requires_grad=True),
        torch.arange(6, device=device),
    )
    values = torch.randint(-90, 90, (16, 8), dtype=torch.int8, device=device)
    whole, found = (values * 0.1).float(), []
    for weight in (whole, Quantised(values, 0.1), whole.as_subclass(Named), torch.nn.Buffer(whole)):
        hidden.grad = None
        hl.HeadLoss().linear(hidden, weight, labels).loss.backward()
        top = hl.topk_log_probs(hidden.detach(), 3, weight=weight)
        teacher = {"teacher": hl.TeacherHead(hidden, weight)}
        taught = hl.HeadLoss([hl.Distillation()]).linear(hidden, whole, labels, inputs=teacher)
        found.append((hidden.grad.clone(), top.log_probs, taught.loss.detach()))
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one))
    logits = Quantised(torch.randint(-9, 9, (6, 16), dtype=torch.int8, device=device), 0.1)
    assert torch.equal(
        hl.HeadLoss()(logits, labels).loss, hl.HeadLoss()(logits.dequantize(), labels).loss
    )
    calls = (
        lambda x: hl.HeadLoss().linear(hidden, x, labels),
        lambda x: hl.HeadLoss().linear(hidden, whole, labels, bias=x),
        lambda x: hl.HeadLoss()(hidden, labels, token_weight=x),
        lambda x: hl.HeadLoss()(hidden, labels, denominator=x),
        lambda x: hl.HeadLoss()(x, labels),
        lambda x: hl.kept_ids(hidden, hl.SamplingRule(top_k=2), weight=x),
    )
    for wrong in (
        Quantised(values, 0.1, dequantizes=False),
        Quantised(values, 0.1, requires_grad=True),
        whole.as_subclass(Doubled),
    ):
        for call in calls:
            with pytest.raises(
                TypeError, match=r"tensor that requires no gradient, got a .*(Quantised|Doubled)"
            ):
                call(wrong)


def test_the_ranks_of_a_local_tensor_are_not_one_tensor():
    LocalTensorMode = pytest.importorskip("torch.distributed._local_tensor").LocalTensorMode
    with LocalTensorMode(2), pytest.raises(TypeError, match="LocalTensor: pass the plain"):
        hl.HeadLoss()(torch.randn(4, 8), torch.arange(4))


def test_operands_on_meta_have_results_on_meta():
    found = hl.topk_log_probs(
        torch.zeros(2, 8, device="meta"), 2, weight=torch.zeros(V, 8, device="meta")
    )
    assert found.ids.is_meta and found.ids.shape == (2, 2)


@pytest.mark.parametrize("mode", ["auto", "one_sweep", "recompute"])
def test_a_head_on_meta_has_a_loss_and_gradients_on_meta(mode):
    hidden, weight = (torch.zeros(n, 8, device="meta", requires_grad=True) for n in (2, V))
    labels = torch.zeros(2, dtype=torch.int64, device="meta")
    out = hl.HeadLoss().linear(hidden, weight, labels, linear=hl.Linear(mode))
    out.loss.backward()
    assert out.loss.is_meta and hidden.grad.is_meta and weight.grad.shape == weight.shape


def test_a_trained_denominator_is_checked_without_a_warning():
    logits, labels = torch.zeros(2, 8, requires_grad=True), torch.tensor([1, 2])
    denominator = torch.tensor(4.0, requires_grad=True)
    head = hl.HeadLoss(options=hl.Options(check=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head(logits, labels, denominator=denominator)
