"""`HeadLoss`: weighted terms over one set of statistics, with one pass over the logits and one
denominator.

A call becomes a `Request`: its arguments are checked and placed, or it is of a kind that was checked
before. Then a way computes the statistics that all terms and metrics want together, which is where
ranks exchange something. Last, terms and metrics are evaluated on the statistics and summed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..arguments.linear import Linear
from ..arguments.options import DEFAULTS, Options, Transform
from ..arguments.sequences import SequenceReduction
from ..call.agreement import Agreement
from ..call.compile import uncompiled_where_needed
from ..call.given import LINES, Given
from ..call.request_of import build_request
from ..call.statistics import computed_statistics
from ..engine.request import Request
from ..engine.ways import Case, Explanation, explained, way_of
from ..linear_head.request import LinearRequest
from ..ranks.shard import VocabShard
from ..spec import (
    Bias,
    Floating,
    Labels,
    Logits,
    Rows,
    Scalar,
    TokenWeight,
    called_as,
    checked,
    described,
)
from ..spec.checks import refuse_transforms
from . import remembered
from .checks import Call, Inputs, check_call, local_arguments, replicated_facts
from .definition import HeadLossDefinition, Reduction
from .evaluation import checked_evaluation, compiled_evaluate, evaluate
from .linear_ways import explained_linear, linear_output, linear_way_of
from .named import OF_CALL, refused_argument, refused_attribute
from .output import HeadLossOutput, compared_output, make_output
from .reduction import CallLoss
from .terms import Metrics, Term, Terms

NO_OPTIONS = Linear()


def _argument(name: str, doc: str) -> property:
    """A property that reads an argument of `HeadLoss`, and checks all of them again when it is
    assigned."""

    def read(self):
        return self._definition.arguments()[name]

    def replace(self, value):
        self._definition = HeadLoss(**self._definition.arguments() | {name: value})._definition

    return property(read, replace, doc=doc)


@checked
class HeadLoss(nn.Module):
    """Weighted terms over one set of statistics: one pass over the logits, one collective, one
    backward kernel.

    Not for a Transformers model's ``model.loss_function``: it is a Module, which torch files under
    the model's parts, and the model keeps its own loss. Use
    `integrations.transformers.causal_lm_loss`.

    A call has the arguments of `forward`. Terms, metrics, reduction, ignore_index and options may be
    assigned later, ``loss.terms = [*loss.terms, ZLoss(1e-4)]``: terms and metrics are tuples, which
    have no append. Arguments of a call cannot be assigned; other attributes change nothing.

    Args:
        terms: one `Term`, or a list of distinct names, which is copied; by default `CrossEntropy`.
        metrics: names, "accuracy", "entropy", "log_prob", "lse", "perplexity", "rank" and the
            statistics of teachers and sets, and `Metric`s such as ``PolicyMetrics()``; one, or a
            list. Outputs hold their sums, of "perplexity" that of the log-probs: see
            `HeadLossOutput.means`.
        reduction: "mean" divides every term by the number of valid tokens, or by the sum of the
            token weights and of the labels' class weights where there are any; "sum" divides by
            nothing; "none" returns a loss per token. The reductions of `Sequences.aggregate`
            ("seq-mean-token-mean", ...) weigh tokens by their sequence and need the input
            "sequences". A caller's denominator replaces a mean's. A divisor of 0 gives 0 and zero
            gradient. verl's names "token-mean" and "token-sum" are taken for "mean" and "sum".
        ignore_index: label of tokens that have no loss and no gradient.
        options: as in `vocab_statistics`.
        compile: True evaluates the terms' and metrics' own PyTorch through torch.compile, as one
            kernel each way instead of one per operation. A `StatisticValue` needs no compilation.
            torch recompiles for new kinds of inputs until it reaches a limit
            (torch._dynamo.config.recompile_limit), and then continues in eager.

    Examples:
        >>> head_loss = HeadLoss([CrossEntropy(), ZLoss(1e-4)], metrics=("accuracy", "entropy"))
        >>> head_loss
        HeadLoss(terms=[cross_entropy, 0.0001 * z_loss], metrics=[accuracy, entropy], reduction='mean')
        >>> logits = torch.zeros(2, 4, requires_grad=True)
        >>> out = head_loss(logits, torch.tensor([0, -100]), denominator=2)  # tokens of all ranks
        >>> out.loss.backward()
        >>> logits.grad[0]
        tensor([-0.3750,  0.1250,  0.1250,  0.1250])
    """

    made_of = (Term,)  # for errors about terms in the place of a HeadLoss

    def __init__(
        self,
        terms: Terms | None = None,
        *,
        metrics: Metrics = (),
        reduction: Literal[Reduction, SequenceReduction, "token-mean", "token-sum"] = "mean",
        ignore_index: int = -100,
        options: Options | None = None,
        compile: bool = False,
    ):
        super().__init__()
        self._definition = HeadLossDefinition.checked(
            terms, metrics, reduction, ignore_index, options
        )
        self.compile_terms = compile
        self._evaluate: Callable | None = None

    # Arguments may be replaced after construction; the definition is checked and made anew.
    terms = _argument("terms", "Weighted terms, a tuple of `Term`.")
    metrics = _argument("metrics", "Names of `METRICS` and `Metric`s, a tuple.")
    reduction = _argument("reduction", "How per-token losses become one number.")
    ignore_index = _argument("ignore_index", "Label of tokens without a loss.")
    options = _argument("options", "`Options`, or None for the defaults.")

    weight = refused_attribute("weight", "class_weight")
    label_smoothing = refused_attribute("label_smoothing", "label_smoothing")
    transform, shard, inputs, token_weight, denominator = map(refused_argument, OF_CALL)

    @property
    def want(self) -> tuple[str, ...]:
        """Names of the optional statistics that terms and metrics need."""
        return self._definition.want

    @property
    def input_names(self) -> set[str]:
        """Names of the inputs that a call must have."""
        return set(self._definition.plan.inputs)

    def extra_repr(self) -> str:
        return self._definition.description()

    @uncompiled_where_needed
    @described
    def forward(
        self,
        logits: Logits,
        labels: Labels,
        *,
        shard: VocabShard | None = None,
        token_weight: TokenWeight | None = None,
        denominator: Scalar | float | None = None,
        transform: Transform | None = None,
        inputs: Inputs | None = None,
    ) -> HeadLossOutput:
        """Loss of logits [.., width] sharded on V, labels [..] replicated -> `HeadLossOutput`,
        replicated.

        Forward: one collective. Backward: no communication. All ranks of the shard's group call with
        equal numbers of tokens, in one order, and the values of terms and metrics are equal on them.
        Only ``Options(validate="full")`` compares calls (of logits no values), and the sums of these
        values: a rank that has no tokens or leaves a call out meets other calls later, silently.

        Args:
            logits, labels, shard, transform: as in `vocab_statistics`.
            token_weight: [..], multiplies every term; a loss mask, say. A token of weight 0 counts
                as ignored, whatever its logits or its loss are, unless the weights require a
                gradient; with the input "sequences" only its own loss is left out, and sums and
                ratios of its sequence still include it, as the sequences' mask says. The mean
                divides by the sum of the weights, so weights of both signs need a denominator from
                the caller.
            denominator: what every term is divided by: the count of tokens (or of sequences, whole
                ones in each call) of all micro-batches and data-parallel ranks, never of ranks that
                share the vocabulary, over the number of ranks where these average gradients, as DDP
                and FSDP do; with token or class weights the sum of the valid tokens' weights, with
                both of their products. Others give another scale, silently. At least 0, and of a
                mean: no "sum" or "none". ``Options(check=True)`` alone looks at a tensor's value.
            inputs: arguments of terms and metrics besides the statistics, by name, replicated, just
                those of `input_names`; others are an error, except "sequences":
                tensors, scalar or with as many dimensions as [..] that broadcast to it, in its own
                shape a value per token (so log-probs must be); with sequences, tensors [B] with a
                value per sequence, which terms get as [..] too, where that is not the labels'
                shape; for terms of "log_probs_at", tensors [.., K], "ids" among them; "sequences",
                a `Sequences` with the labels' shape, whose mask ignores tokens; "teacher", a
                `Teacher` or a `TopKTeacher`, for `linear` also a `TeacherHead`; "sets", `IdSets`
                of the same ``transform``.

        Raises:
            TypeError, ValueError: the errors of `vocab_statistics`, and inputs that terms need and
                did not get.
        """
        kind = self._kind(logits, labels, shard, token_weight, denominator, transform, inputs)
        again = logits, labels, shard, denominator, inputs, transform
        found = kind and remembered.checked_before(self._definition, kind, *again)
        if found is None:
            given = self._given(logits, labels, shard, transform)
            call, request = self._checked(given, token_weight, denominator, inputs)
            remembered.remember(kind, call, request)
        else:
            call, request = found
        case, options = self._case(call, request), self._definition.options
        way = way_of(case)
        stats, loss, sums = computed_statistics(
            request, call.labels, options, way, way.reduction(case.loss)
        )
        made_of = call, stats, self._evaluate_functions, case.loss.fused, loss, sums
        if options is not None and options.validate != "metadata":  # which no compiler traces
            return compared_output(request.shard, partial(make_output, *made_of))
        return make_output(*made_of)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self): ...

    @described
    def explain(
        self,
        logits: Logits,
        labels: Labels,
        *,
        shard: VocabShard | None = None,
        token_weight: TokenWeight | None = None,
        denominator: Scalar | float | None = None,
        transform: Transform | None = None,
        inputs: Inputs | None = None,
    ) -> Explanation:
        """Say which way later calls with such arguments take, and what stands in the way of each
        quicker one.

        It looks at metadata, and computes nothing. With ``Options(validate=)`` that compares
        arguments, all ranks call it.

        Args:
            logits, labels, shard, token_weight, denominator, transform, inputs: as in `forward`.

        Raises:
            TypeError, ValueError: as in `forward`.

        Examples:
            >>> logits, labels = torch.zeros(2, 8, requires_grad=True), torch.tensor([1, 2])
            >>> found = HeadLoss().explain(logits, labels)
            >>> found.way, found.obstacles["one read"]
            ('general', 'needs logits on a GPU, got cpu')
        """
        kind = self._kind(logits, labels, shard, token_weight, denominator, transform, inputs)
        given = self._given(logits, labels, shard, transform)
        call, request = self._checked(given, token_weight, denominator, inputs)
        if kind is not None:
            request = request._replace(ways={})
        return explained(self._case(call, request))

    @described
    def explain_linear(
        self,
        hidden: Floating,
        weight: Rows,
        labels: Labels,
        *,
        bias: Bias | None = None,
        shard: VocabShard | None = None,
        token_weight: TokenWeight | None = None,
        denominator: Scalar | float | None = None,
        transform: Transform | None = None,
        inputs: Inputs | None = None,
        linear: Linear | None = None,
    ) -> Explanation:
        """Say which way `linear` takes with such arguments, as `explain` does for logits.

        Args:
            hidden, weight, labels, bias, shard: as in `linear`.
            token_weight, denominator, transform, inputs, linear: as in `linear`.

        Raises:
            TypeError, ValueError: as in `linear`, but for a budget without room for a block.

        Examples:
            >>> hidden, weight = torch.ones(2, 8, requires_grad=True), torch.nn.Parameter(torch.ones(4, 8))
            >>> print(HeadLoss(reduction="none").explain_linear(hidden, weight, torch.tensor([0, 1])))
            the way is blocks
            fp8 sweep: gradients='fp8' was not asked for
            one sweep: a loss per token has no scalar upstream gradient
            epilogues: they were not compared with blocks of logits on such a device
        """
        given = hidden, weight, labels, bias, shard, token_weight, denominator, transform, inputs
        return explained_linear(*self._checked_linear(*given, linear or NO_OPTIONS))

    def _kind(
        self, logits, labels, shard, token_weight, denominator, transform, inputs
    ) -> tuple | None:
        """The kind of a call, or None where its checks look at more than that."""
        if token_weight is not None:
            return None
        call = logits, labels, shard, denominator, inputs, transform
        return remembered.kind_of_call(self._definition.options, *call)

    def _checked_linear(
        self,
        hidden,
        weight,
        labels,
        bias,
        shard,
        token_weight,
        denominator,
        transform,
        inputs,
        linear,
    ) -> tuple[Call, LinearRequest]:
        """Check the arguments of `linear`."""
        LINES["linear"].check("linear", linear, {})
        given = self._given(None, labels, shard, transform)
        given = given._replace(hidden=hidden, weight=weight, bias=bias, linear=linear)
        return self._checked(given, token_weight, denominator, inputs)

    def _case(self, call: Call, request: Request) -> Case:
        """The call as its ways look at it."""
        refuse_transforms()
        options, facts = self._definition.options or DEFAULTS, request.facts
        loss = CallLoss(call, request.tensors.logits, facts.backend, facts.vocab_size)
        return Case(request, loss, options.gradient, options.inplace, self._definition.plan.record)

    def _checked(self, given: Given, token_weight, denominator, inputs) -> tuple[Call, Any]:
        """Check the arguments of a call -> the call, and the request for its statistics, or the
        linear head's call."""
        name = "HeadLoss" if given.linear is None else "HeadLoss.linear"
        with Agreement(given.options, given.shard, inputs) as agreement:
            tokens, given = given.tokens, given.local()
            token_weight, denominator, inputs = local_arguments(
                tokens, given, token_weight, denominator, inputs
            )
            definition = self._definition
            # a graph cannot take the functions of a plan from outside
            if torch.compiler.is_compiling():
                definition = definition.planned()
            facts = replicated_facts(definition, token_weight, denominator, inputs)
            agreement.record(name, given.shard, **facts, **given.facts())
            call = check_call(definition, given, token_weight, denominator, inputs)
            given = given._replace(
                labels=call.labels,
                teacher=call.inputs.get("teacher"),
                sets=call.inputs.get("sets"),
                ids=call.ids,
                total_weight=call.total_weight,
            )
            return call, build_request(given) if given.linear is None else LinearRequest.checked(
                given
            )

    @uncompiled_where_needed
    @described
    def linear(
        self,
        hidden: Floating,
        weight: Rows,
        labels: Labels,
        *,
        bias: Bias | None = None,
        shard: VocabShard | None = None,
        token_weight: TokenWeight | None = None,
        denominator: Scalar | float | None = None,
        transform: Transform | None = None,
        inputs: Inputs | None = None,
        linear: Linear | None = None,
    ) -> HeadLossOutput:
        """Loss of the logits hidden @ weight^T + bias, which never exist as a whole ->
        `HeadLossOutput`, replicated.

        Collective forward and, but for one sweep, backward, which all ranks call with equal numbers
        of tokens, in one order, as in `forward`. One sweep, where the forward computes the
        gradients, needs: a reduction other than "none"; terms that are `Term.tokenwise`, as
        built-in terms are unless they take "sequences" or look at all tokens; a denominator from
        the caller for terms with a `Term.token_weight`, such as class weights beside another term;
        no gradient of weights, denominator, inputs or what a function closes over; a declared
        `Linear.upstream` (the loss scale) in float16; torch.is_grad_enabled(); no torch.compile.
        Its statistics cannot be differentiated; trying raises RuntimeError.

        Args:
            hidden, weight, bias, shard: as in `linear_vocab_statistics`.
            linear: how the gradient of the hidden states is reduced, the mode and its memory.
            labels, token_weight, denominator, transform, inputs: as in `forward`.

        Raises:
            TypeError, ValueError: as in `forward`; a budget that is too small, or a mode that the
                call rules out (without gradients every mode is recompute).

        Examples:
            >>> hidden, weight = (
            ...     torch.ones(2, 8, requires_grad=True),
            ...     torch.nn.Parameter(torch.ones(4, 8)),
            ... )  # [V/P, H]
            >>> HeadLoss().linear(hidden, weight, torch.tensor([0, 1])).loss.detach()
            tensor(1.3863)
        """
        linear = NO_OPTIONS if linear is None else linear
        options, kind = self._definition.options, None
        again = hidden, weight, labels, shard, denominator, inputs
        if token_weight is None and transform is None and bias is None:
            kind = remembered.kind_of_linear_call(options, *again, linear)
        found = kind and remembered.linear_checked_before(self._definition, kind, *again)
        if found is None:
            given = hidden, weight, labels, bias, shard, token_weight, denominator
            call, head = self._checked_linear(*given, transform, inputs, linear)
            way = linear_way_of(call, head)
            remembered.remember_linear(kind, call, head, way)
        else:
            call, head, way = found
        out = linear_output(call, head, way, self._evaluate_functions)
        if options is not None and options.validate != "metadata":
            return compared_output(head.request.shard, lambda: out)
        return out

    def _given(self, logits, labels, shard, transform) -> Given:
        """The arguments of a call with those of the definition."""
        given = Given.checked(logits, labels, shard, self.want, transform, self.options)
        return given._replace(ignore_index=self.ignore_index)

    def _evaluate_functions(self, functions, metrics, stats, inputs, *args):
        """Call `evaluate`, within torch.compile as it is, else this module's compiled copy, if any."""
        if torch.compiler.is_compiling():
            return evaluate(functions, metrics, stats, inputs, *args)
        if self._evaluate is None:
            self._evaluate = compiled_evaluate() if self.compile_terms else evaluate
        check = self.options is not None and self.options.check
        return checked_evaluation(self._evaluate, check, functions, metrics, stats, inputs, *args)

    def __getstate__(self):
        """Attributes without the compiled function, which can be neither copied nor pickled, and
        what is worked out."""
        return {
            **self.__dict__,
            "_evaluate": None,
            "_definition": self._definition._replace(plan=None),
        }

    def __setstate__(self, state):
        super().__setstate__(state)
        self._definition = self._definition.planned()
