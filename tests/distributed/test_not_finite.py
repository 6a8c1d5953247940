"""`Options(check=True)` names the NaN or the infinity that makes a loss NaN: where, and how
many."""

import functools

import pytest
import torch
from ranks import Failure, on_ranks

import tp_headloss as hl

V, N, H = 40, 6, 8
CHECK, NAN, INF = hl.Options(check=True), torch.nan, torch.inf


class Problem:
    """Arguments of a call, this rank's part of the vocabulary, in which tests plant what is not
    finite."""

    def __init__(self, group, device):
        self.shard, self.device = hl.VocabShard.from_group(group, V), device
        sizes = {
            "logits": (N, V),
            "hidden": (N, H),
            "weight": (V, H),
            "bias": (V,),
            "teacher": (N, V),
        }
        for name, size in sizes.items():
            setattr(
                self,
                name,
                torch.randn(*size, generator=torch.Generator().manual_seed(1)).to(device),
            )
        self.labels = torch.arange(N, device=device) * 7 % V
        self.labels[4] = -100
        self.token_weight, self.reference = (
            torch.ones(N, device=device),
            torch.zeros(N, device=device),
        )
        self.log_probs = torch.full((N, 2), -3.0, device=device)
        self.temperature = torch.full((N,), 2.0, device=device)

    def cut(self, x, dim):
        return x.narrow(dim, self.shard.start, self.shard.valid_width).clone()

    def run(self, way, options=CHECK):
        if way == "auto" and (group := self.shard.group):  # the last rank owns none
            self.shard = hl.VocabShard.from_boundaries([0, *[V] * group.size()], V, group)
        shard, labels = self.shard, self.labels
        logits, weight, bias = (
            self.cut(self.logits, 1),
            self.cut(self.weight, 0),
            self.cut(self.bias, 0),
        )
        if way == "statistics":
            return hl.vocab_statistics(
                logits, labels, shard=shard, want=("entropy",), options=options
            ).lse
        if way == "linear statistics":
            return hl.linear_vocab_statistics(
                self.hidden, weight, labels, bias=bias, shard=shard, options=options
            ).lse
        if way in ("one_sweep", "recompute", "valid tokens", "auto"):
            hidden, head_loss = self.hidden.requires_grad_(), hl.HeadLoss(options=options)
            linear = hl.Linear(max_valid_tokens=N) if way == "valid tokens" else hl.Linear(way)
            return head_loss.linear(
                hidden, weight, labels, bias=bias, shard=shard, linear=linear
            ).loss
        if way == "sequence parallel":
            part = self.hidden.chunk(shard.world_size)[
                0 if shard.group is None else shard.group.rank()
            ]
            linear = hl.Linear(hidden_grad="reduce_scatter")
            return (
                hl.HeadLoss(options=options)
                .linear(part, weight, labels, shard=shard, linear=linear)
                .loss
            )
        terms, keywords = [hl.Distillation()] if way == "teacher head" else None, {}
        if way == "teacher":
            terms, keywords = (
                [hl.Distillation()],
                {"inputs": {"teacher": hl.Teacher(self.cut(self.teacher, 1))}},
            )
        elif way in ("teacher's temperature", "student's temperature"):
            given = (
                (self.temperature,) if way == "teacher's temperature" else (1.0, self.temperature)
            )
            teacher = hl.Teacher(self.cut(self.teacher, 1), *given)
            terms, keywords = [hl.Distillation()], {"inputs": {"teacher": teacher}}
        elif way == "temperature":
            keywords = {"transform": hl.Transform(temperature=self.temperature)}
        elif way == "entries":
            teacher = hl.TopKTeacher(
                torch.tensor([[1, 30]] * N, device=self.device), self.log_probs
            )
            terms, keywords = [hl.TopKDistillation()], {"inputs": {"teacher": teacher}}
        elif way == "reference":
            terms, keywords = (
                [hl.KLToReference(0.1)],
                {"inputs": {"reference_log_prob": self.reference}},
            )
        elif way == "token weight":
            keywords = {"token_weight": self.token_weight}
        elif way == "scaled":
            keywords = {"transform": hl.Transform(scale=-2.0)}
        head_loss = hl.HeadLoss(terms, options=options)
        if way == "teacher head":
            inputs = {"teacher": hl.TeacherHead(self.hidden, weight)}
            student = torch.zeros_like(self.hidden), torch.zeros_like(weight)
            return head_loss.linear(*student, labels, shard=shard, inputs=inputs).loss
        return head_loss(logits, labels, shard=shard, **keywords).loss


def said(what, value, column, rank, such="1 such token"):
    return f"{what} hold{'s' * ('of id' in what)} {value} in column {column} of rank {rank}; {such}"


ROW = slice(None)
# name -> (way of a call, argument, [(row, column, value), ..], message). Rank {r} owns id 27, rank
# {l} is the last.
CASES = {
    "logits": ("loss", "logits", [(2, 27, NAN)], said("logits of token 2", "NaN", 27, "{r}")),
    "inf": (
        "statistics", "logits", [(3, 27, INF), (5, 1, NAN)],
        said("logits of token 3", "inf", 27, "{r}", "2 such tokens"),
    ),
    "ignored": ("loss", "logits", [(4, 27, NAN), (5, 27, NAN)], said("logits of token 5", "NaN", 27, "{r}")),
    "negative scale": ("scaled", "logits", [(1, 27, -INF)], said("logits of token 1", "-inf", 27, "{r}")),
    "hidden": ("linear statistics", "hidden", [(2, 5, NAN)], said("hidden states of token 2", "NaN", 5, 0)),
    "one sweep": ("one_sweep", "hidden", [(5, 3, INF)], said("hidden states of token 5", "inf", 3, 0)),
    "valid tokens": ("valid tokens", "hidden", [(5, 3, NAN)], said("hidden states of token 5", "NaN", 3, 0)),
    "part": ("sequence parallel", "hidden", [(5, 3, NAN)], said("hidden states of token 5", "NaN", 3, "{l}")),
    "weight": ("recompute", "weight", [(27, 5, NAN)], said("weight of id 27", "NaN", 5, "{r}", "1 such id")),
    "bias": ("recompute", "bias", [(27, NAN)], said("bias of id 27", "NaN", 0, "{r}", "1 such id")),
    "teacher": ("teacher", "teacher", [(2, 27, NAN)], said("logits of the teacher of token 2", "NaN", 27, "{r}")),
    "entries": ("entries", "log_probs", [(2, 1, NAN)], "teacher.log_probs of token 2 (flat index) holds NaN"),
    "teacher's hidden states": (
        "teacher head", "hidden", [(2, 1, NAN)], said("hidden states of the teacher of token 2", "NaN", 1, 0),
    ),
    "teacher's weight": (
        "teacher head", "weight", [(27, 1, NAN)], said("weight of the teacher of id 27", "NaN", 1, "{r}", "1 such id"),
    ),
    "an empty row": ("loss", "logits", [(2, ROW, -INF)], "logits of token 2 are all -inf; 1 such token"),
    "empty rows of a teacher": (
        "teacher", "teacher", [(2, ROW, -INF), (4, ROW, -INF), (5, ROW, -INF)],
        "logits of the teacher of token 2 are all -inf; 2 such tokens",
    ),
    "temperature": (
        "temperature", "temperature", [(3, 0.0)], "temperature of token 3 must be positive and finite; 1 such token",
    ),
    "teacher's temperature": (
        "teacher's temperature", "temperature", [(3, -1.0)],
        "temperature of the teacher of token 3 must be positive and finite; 1 such token",
    ),
    "student's temperature": (
        "student's temperature", "temperature", [(3, NAN)],
        "student_temperature or temperature of token 3 must be positive and finite; 1 such token",
    ),
    "input": (
        "reference", "reference", [(3, NAN), (4, NAN)],
        "input 'reference_log_prob' of token 3 (flat index) holds NaN; 1 such token",
    ),
    "token weight": (
        "token weight", "token_weight", [(3, INF)], "token_weight of token 3 (flat index) holds inf; 1 such token",
    ),
    "no weight": (
        "token weight", "token_weight", [(3, -INF)], "token_weight of token 3 (flat index) holds -inf; 1 such token",
    ),
    "a rank without ids": ("auto", "hidden", [(2, 5, NAN)], said("hidden states of token 2", "NaN", 5, 0)),
    "overflow": ("recompute", "weight", [(27, 1, 3e38), (27, 2, 3e38), (27, 3, -3e38)], "are beyond torch.float32"),
}  # fmt: skip


def planted(group, device, name, options):
    way, argument, places, _ = CASES[name]
    problem = Problem(group, device)
    for *place, value in places:
        getattr(problem, argument)[tuple(place)] = value
    if name == "overflow":
        problem.hidden = problem.hidden.abs() * 100
    return problem.run(way, options).detach().isnan().any()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_check_names_the_place_on_every_rank(name, world_size):
    results = on_ranks(world_size, planted, name, CHECK, failures=True)
    owner = 27 // 20 if world_size == 2 else 0
    expected = CASES[name][-1].format(r=owner, l=world_size - 1)
    for result in results:
        assert isinstance(result, Failure) and result.kind == "ValueError", result
        assert expected in result.message, result.message
    assert len({result.message for result in results}) == 1
    assert all(on_ranks(world_size, planted, name, None)), "NaN without check"


def harmless(group, device):
    problem = Problem(group, device)
    problem.logits[4] = NAN  # its label is ignored
    problem.logits[2, 27] = -INF
    problem.token_weight[1] = 0.0
    problem.logits[1, 3] = INF
    return problem.run("token weight").isfinite()


@pytest.mark.parametrize("world_size", [1, 2])
def test_check_takes_what_makes_no_token_nan(world_size):
    assert all(on_ranks(world_size, harmless))


SCORED = {
    "denominator": torch.tensor(-12.0),
    "inputs": {"reference_log_prob": torch.full((N,), 0.5)},
}


@pytest.mark.parametrize("name", SCORED)
def test_check_looks_at_the_values_of_each_call(name):
    head_loss, labels = hl.HeadLoss([hl.KLToReference(0.1)], options=CHECK), torch.arange(N)
    right = {
        "denominator": torch.tensor(12.0),
        "inputs": {"reference_log_prob": torch.full((N,), -0.5)},
    }
    for _ in range(2):
        assert head_loss(torch.zeros(N, V), labels, **right).loss > 0
    with pytest.raises(ValueError, match=r"denominator must be at least 0|are these probabilities"):
        head_loss(torch.zeros(N, V), labels, **right | {name: SCORED[name]})


def partly_empty(group, device):
    """Token 2 has no teacher, and logits on one rank alone; token 5 has no logits at all."""
    problem = Problem(group, device)
    problem.teacher[2] = problem.logits[5] = -INF
    problem.logits[2, :20] = -INF
    return problem.run("teacher")


@pytest.mark.parametrize("world_size", [1, 2])
def test_check_counts_a_row_as_empty_if_it_is_on_all_ranks(world_size):
    for result in on_ranks(world_size, partly_empty, failures=True):
        assert "logits of token 5 are all -inf; 1 such token" in result.message


# of a trained parameter and statistics -> a value that is not finite where they are 0
OF_ZEROS = {
    "quotient": lambda t, s: t / s.lse,
    "logarithm": lambda t, s: t * s.lse.log(),
    "unlikelihood": lambda t, s: -t * torch.log1p(-s.log_prob.exp()),
    "mean logit": lambda t, s: t * s.total / s.mass,
}


@pytest.mark.parametrize("is_linear", [False, True])
@pytest.mark.parametrize("name", OF_ZEROS)
def test_check_names_a_trained_term_that_is_not_finite_where_a_token_is_ignored(name, is_linear):
    """Whose parameter would have a gradient of NaN."""
    problem, function = Problem(None, torch.device("cpu")), OF_ZEROS[name]
    trained = torch.nn.Parameter(torch.tensor(2.0))
    want = ("total",) if name == "mean logit" else ()

    def loss_of(own, **options):
        term = hl.Term("own", own, want=want)
        head = hl.HeadLoss([term], options=hl.Options(**options))
        if is_linear:
            return head.linear(problem.hidden.requires_grad_(), problem.weight, problem.labels).loss
        return head(problem.logits.requires_grad_(), problem.labels).loss

    def chosen(s):
        numbers = {"lse": 0.7, "log_prob": -0.7} | dict.fromkeys(["mass"] * len(want), 0.7)
        safe = {k: torch.where(s.valid, getattr(s, k), x) for k, x in numbers.items()}
        return function(trained, s._replace(**safe))

    with pytest.raises(ValueError, match="term 'own' is not finite at the ignored token 4"):
        loss_of(lambda s: function(trained, s), check=True)
    loss_of(lambda s: function(trained.detach(), s), check=True)  # trains nothing
    loss_of(chosen, check=True).backward()
    assert trained.grad.isfinite() and trained.grad != 0


def labelled(group, device, *of_ranks, way="statistics"):
    """Token 1 has another label on each rank: the error of each."""
    problem = Problem(group, device)
    problem.labels[1] = of_ranks[0 if group is None else group.rank()]
    try:
        problem.run(way)
    except ValueError as error:
        return str(error)


# ids that no rank says are its own, of two ranks
UNOWNED = [(V - 1, V + 5), (V - 1, -7), (V - 1, 1), (V + 5, 1), (-7, 1), (-100, 1), (V - 1, -100)]


@pytest.mark.parametrize("labels", UNOWNED)
def test_check_says_that_ranks_disagree_where_a_rank_has_a_good_label(labels):
    """A label that nobody can own is called that on the rank alone that has it."""
    for label, said in zip(labels, on_ranks(2, labelled, *labels)):
        assert said.startswith("label of token 1 "), said
        is_good = label == -100 or 0 <= label < V
        assert ("which ranks do not agree on" in said) == is_good, said
        assert ("do they hold other batches? Then shard=" in said) == is_good, said


@pytest.mark.parametrize("way", ["valid tokens", "one_sweep"])
def test_check_of_a_linear_head_asks_for_other_batches_where_a_token_is_ignored_on_one_rank(way):
    for said in on_ranks(2, functools.partial(labelled, way=way), -100, 1):
        assert "do not agree on" in said and "do they hold other batches? Then shard=" in said, said
