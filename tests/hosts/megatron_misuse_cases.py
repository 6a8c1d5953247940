"""What users of Megatron-Core get wrong about a head: one that nothing calls, blocks that hold nothing,
ranks whose heads differ, and arguments of another form. `megatron_soft_target_cases` runs them."""

import gc

import megatron_cases as m
import torch
from cases import refused
from megatron_cases import B, S, V, batch, model_of, run

# isort: split
# what is above makes Megatron run on CPUs, before it is imported
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel

from tp_headloss import (
    BitsPerByte,
    CrossEntropy,
    Distillation,
    HeadLoss,
    KLToReference,
    Linear,
    LKLoss,
    Options,
    PolicyGradient,
    ZLoss,
    mean_metrics,
    reduce_metrics,
)
from tp_headloss.integrations.megatron import MegatronHead, MegatronHeadMixin, install
from tp_headloss.ranks.shard import has_vocab_shard
from tp_headloss.spec.alias_table import HEAD
from tp_headloss.spec.aliases import ALIASES

SMOOTHED = [CrossEntropy(label_smoothing=0.5), ZLoss(1e-3)]
INPLACE = MegatronHead(ignore_index=-100, options=Options(inplace=True))
SCATTERED = MegatronHead(ignore_index=-100, linear=Linear(hidden_grad="reduce_scatter"))
TAUGHT = MegatronHead(ignore_index=-100, depth_terms=Distillation(1.0, "cross_entropy"))


def head_of(**given):
    return MegatronHead(**({"ignore_index": -100} | given))


def watching(*args):
    """A hook that changes nothing."""


def gathering(*args):
    """A hook of Megatron's wrappers."""


gathering.__module__ = "megatron.core.distributed"


def assigned_heads(group):
    """A HeadLoss, which is a module, is taken as `install` takes it; nothing else is taken."""
    model, theirs = model_of(m.Mixed), model_of()
    with install(theirs, HeadLoss(SMOOTHED)):
        expected = run(theirs)
    model.megatron_head = HeadLoss(SMOOTHED)
    found = m.compared(*run(model), *expected, m.head_name(model))
    assert model.megatron_head.calls == 1 and "megatron_head" not in model._modules

    def assigning(value):
        return lambda: setattr(model, "megatron_head", value)

    for value in (MegatronHead, HeadLoss, CrossEntropy(), SMOOTHED, "head", model_of()):
        refused(assigning(value), "megatron_head must be `MegatronHead`, or `Head", TypeError)

    def misnamed():
        model.head = head_of()

    refused(misnamed, "is the model's megatron_head, got it as 'head'", AttributeError)
    refused(assigning(HeadLoss(reduction="sum")), "reduction='mean' or 'none', got 'sum'")
    refused(assigning(INPLACE), "Options(inplace=True) is for logits")
    refused(assigning(TAUGHT), "depth_terms need fused=True")
    model_of(m.Mixed, mtp=True).megatron_head = TAUGHT
    assert model.megatron_head.calls == 1  # what was refused has replaced nothing
    model.megatron_head = None
    stock = model_of()
    return found | {"none": bool(torch.equal(run(model)[0], run(stock)[0]))}


def classes_with_the_mixin(group):
    """Whatever class with a loss stands before the mixin, or behind it without GPTModel's entry."""

    class Own(GPTModel):
        pass

    losing = [GPTModel, Own]
    lacking = [LanguageModule]
    if m.HAS_HYBRID:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        lacking.append(HybridModel)
    for base in losing + lacking:
        wrong = lambda base=base: type("Wrong", (base, MegatronHeadMixin), {})  # noqa: E731
        refused(wrong, "write class Wrong(MegatronHeadMixin, ", TypeError)
    for base in lacking:
        wrong = lambda base=base: type("Wrong", (MegatronHeadMixin, base), {})  # noqa: E731
        refused(wrong, "use install(model, head)", TypeError)
    for base in losing:
        type("Right", (MegatronHeadMixin, base), {})
    grown = type("Grown", (type("Part", (MegatronHeadMixin,), {}), GPTModel), {})
    type("Further", (grown,), {"_postprocess": lambda self, *args, **kwargs: None})
    named = type("Named", (MegatronHeadMixin, GPTModel), {"megatron_head": HeadLoss(SMOOTHED)})
    model = model_of(named)
    run(model)
    assert model.megatron_head.calls == named.megatron_head.calls == 1
    wrong = lambda: type("Wrong", (MegatronHeadMixin, GPTModel), {"megatron_head": HeadLoss})  # noqa: E731
    refused(wrong, "got the class HeadLoss", TypeError)

    class Early(m.Mixed):
        def __init__(self, **given):
            self.megatron_head = head_of()
            super().__init__(**given)

    refused(lambda: model_of(Early), "must be set after super().__init__(..)")
    return {}


def blocks(group):
    """A block counts the losses within it, and one of what was removed is an error."""
    for fused in (True, False):
        model = model_of()
        installed = install(model, head_of(), fused=fused)
        run(model)

        def unused(installed=installed):
            with installed:
                pass

        refused(unused, "no loss came through", RuntimeError)
        refused(unused, "removed already: install it anew", RuntimeError)
        with install(model, head_of(), fused=fused) as installed:
            run(model)
    return {}


def metrics_over_the_vocabularys_group(group):
    """The group of the output layer is refused as long as there is a head, whatever called it."""

    def used(head, model, **given):
        model(*batch()[:3], labels=batch()[3], **given)
        return head

    def installed(fused=True, mtp=False, **given):
        model = model_of(mtp=mtp)
        return used(install(model, head_of(**given), fused=fused).head, model)

    def assigned():
        model = model_of(m.Mixed)
        model.megatron_head = head_of()
        return used(model.megatron_head, model)

    def processor():
        head = head_of()
        return used(head, model_of(), output_processor=head)

    ways = [
        installed,
        assigned,
        lambda: installed(fused=False),
        lambda: installed(linear=Linear("one_sweep")),
        lambda: installed(mtp=True),
    ] + [processor] * m.HAS_PROCESSOR
    sharing = parallel_state.get_tensor_model_parallel_group()
    for way in ways:
        head = way()
        gc.collect()
        last = head.last
        sums = last.metrics | {"count": last.count}
        refused(lambda: mean_metrics(last, sharing), "got the group of a VocabShard")  # noqa: B023
        refused(lambda: reduce_metrics(sums, sharing), "got the group of a VocabShard")  # noqa: B023
        del head
        gc.collect()
        assert not has_vocab_shard(sharing.group_name)  # so that the next way is seen by itself
    return {}


def terms_by_themselves(group):
    """One Term, for the main head and for depths, as a list of it."""
    for part in ("terms", "depth_terms"):
        losses = []
        for terms in (SMOOTHED[0], SMOOTHED[:1]):
            model, seen = model_of(mtp=True), []
            with install(model, head_of(**{part: terms}, observe=seen.append)):
                run(model)
            losses.append([out.loss for out in seen])
        assert all(torch.equal(a, b) for a, b in zip(*losses)) and len(losses[0]) == 3
    return {}


def observed(group):
    """Depths are observed in Megatron's order before the main head, with the losses it gets."""
    for fused in (True, False):
        model, seen, given = model_of(mtp=True), [], []
        with install(model, head_of(observe=seen.append), fused=fused) as installed:
            losses = model(*batch()[:3], labels=batch()[3])
            last = installed.last
        assert [out.loss.shape for out in seen] == [(B, S)] * 3
        assert torch.equal(seen[-1].loss, losses) and last is seen[-1], given
    return {}


# argument of MegatronHead -> another value than the default's
OTHERS = {
    "ignore_index": -1,
    "terms": SMOOTHED,
    "depth_terms": SMOOTHED[0],
    "metrics": ("entropy",),
    "vocab_size": V - 5,
    "linear": Linear("one_sweep"),
    "options": Options(check=True),
}
OWN = {"compile", "observe"}  # which ranks may have by themselves


def ranks_that_differ(group):
    """Each argument of which one rank has another value, and each error of one rank alone, is the
    same error on all ranks before anything waits."""
    assert OTHERS.keys() | OWN == MegatronHead.lines.keys()
    other = group.rank() == 1

    def same(function, words, kind=ValueError):
        said = []
        try:
            function()
        except kind as error:
            said = [str(error)]
        everywhere = [None] * group.size()
        torch.distributed.all_gather_object(everywhere, said)
        assert everywhere == [everywhere[0]] * group.size() and said, everywhere
        assert words in said[0], said

    model = model_of(mtp=True)
    for name, value in OTHERS.items():
        head = head_of(**({name: value} if other else {}))
        same(lambda: install(model, head), f"ranks must agree on {name}")  # noqa: B023
    head = head_of(options=Options(check=True) if other else None)
    same(lambda: install(model, head), "ranks must agree on options.check: rank 0 of the group has")
    for terms in (CrossEntropy(label_smoothing=0.2), [SMOOTHED[0], ZLoss(2e-3)]):
        head = head_of(terms=terms if other else SMOOTHED)
        same(lambda: install(model, head), "ranks must agree on terms")  # noqa: B023
    same(lambda: install(model, head_of(), fused=not other), "ranks must agree on fused")
    on_one = "on rank 1 of the group: "
    for head in (
        head_of(vocab_size=V + 1),
        INPLACE,
        SCATTERED,
        head_of(linear=Linear(main_grad=True)),
    ):
        given = head if other else head_of()
        same(lambda: install(model, given), on_one)  # noqa: B023
    given = ZLoss(1.0) if other else head_of()
    same(lambda: install(model, given), on_one + "head must be", TypeError)
    model.config.fp8_output_proj = other
    same(lambda: install(model, head_of()), on_one + "fp8_output_proj=True")
    model.config.fp8_output_proj = False
    hook = model.output_layer.register_forward_hook(watching if other else gathering)
    same(lambda: install(model, head_of()), on_one + "a fused head makes no logits")
    hook.remove()
    if other:
        model.compute_language_model_loss = model.compute_language_model_loss
    same(lambda: install(model, head_of()), on_one + "GPTModel.compute_language_model_loss is repl")
    model.__dict__.pop("compute_language_model_loss", None)
    assert not {"_postprocess", "compute_language_model_loss"} & vars(model).keys()
    with install(model, head_of(compile=other, observe=(lambda out: None) if other else None)):
        run(model)
    return {}


def arguments_of_another_form(group):
    """Errors that say what to write."""
    gathered = model_of()
    gathered.output_layer.gather_output = True  # what parallel_output=False sets
    for fused in (True, False):
        refused(lambda: install(gathered, head_of(), fused=fused), "parallel_output=True, got F")  # noqa: B023
    head, hidden, labels = head_of(), torch.zeros(S, B, 4), batch()[3]
    refused(lambda: head(hidden, labels), "got 2 arguments by position", TypeError)
    refused(lambda: head(labels=labels), "by position and ['labels']", TypeError)
    refused(lambda: MegatronHead.from_head_loss(head), "got MegatronHead", TypeError)
    for mode in ("recompute", "one_sweep"):
        model, mask = model_of(), torch.ones(B, S)
        with install(model, head_of(linear=Linear(mode))):
            for wrong in (mask.flatten(), mask.T.contiguous(), mask[:, 1:], mask[0, 0]):
                refused(lambda: run(model, loss_mask=wrong), "loss_mask must have shape [2, 8]")  # noqa: B023
            for wrong in (labels.flatten(), labels.T.contiguous(), labels[:, 1:], labels[:1]):
                refused(lambda: run(model, wrong), "labels must have shape [2, 8] to fit the ")  # noqa: B023
            refused(lambda: run(model, labels.float()), "labels must be int64 or int32", TypeError)  # noqa: B023
            run(model, loss_mask=batch()[4])
    model, few = model_of(), labels.clone()
    few[:, 1:] = -100
    with install(model, head_of(linear=Linear(max_valid_tokens=B))) as installed:
        found = run(model, few)[0]
    with install(model, head_of()):
        expected = run(model, few)[0]
    assert installed.head.linear == Linear(max_valid_tokens=B)
    torch.testing.assert_close(found, expected)
    if m.HAS_PROCESSOR:
        wrong = lambda: run(model, output_processor=MegatronHead)  # noqa: E731
        refused(wrong, "write output_processor=head, an object, not the class", TypeError)
        for head, words in (
            (INPLACE, "inplace=True) is for logits"),
            (SCATTERED, "leave hidden_g"),
        ):
            refused(lambda: run(model_of(), output_processor=head), words)  # noqa: B023
        wrong = lambda: run(model, output_processor=HeadLoss())  # noqa: E731
        refused(wrong, "or a MegatronHead as the output_processor", TypeError)
        with install(model, head_of()):
            refused(lambda: run(model, output_processor=head_of()), "without output_processor=")
            run(model)
    return {}


def arguments_of_a_head(group):
    """What a MegatronHead has no use for is refused when it is made, with what to write."""
    for alias in ALIASES:
        if alias.of == HEAD:
            said = f"{alias.name!r}: write {alias.ours}"
            refused(lambda: head_of(**{alias.name: 1.0}), said, TypeError)  # noqa: B023
    by_inputs = {
        "teacher": (Distillation(1.0), LKLoss()),
        "advantages": (PolicyGradient(),),
        "reference_log_prob": (KLToReference(0.1),),
    }
    for name, terms in by_inputs.items():
        for term in terms:
            refused(lambda: head_of(terms=term), "it passes none, got some that need [")  # noqa: B023
            if name != "teacher":
                refused(lambda: head_of(depth_terms=term), f"some that need ['{name}")  # noqa: B023
    for metric in ("total_variation", "forward_kl", "set_entropy", BitsPerByte()):
        refused(lambda: head_of(metrics=metric), "must need no inputs, because it passes none")  # noqa: B023
        loss = HeadLoss(metrics=metric)
        refused(lambda: MegatronHead.from_head_loss(loss), "must need no inputs")  # noqa: B023
    for part, said in (("terms", "terms must be"), ("depth_terms", "depth_terms: terms must be")):
        wrong = lambda value: head_of(**{part: value})  # noqa: B023, E731
        refused(lambda: wrong("z_loss"), f"{said} Terms, got 'z_loss': write ZLoss", TypeError)  # noqa: B023
        refused(lambda: wrong({"z_loss": 1.0}), f"{said} Terms, got dict: write a list", TypeError)  # noqa: B023
    refused(lambda: head_of(metrics={"lse": 1}), "got dict: write a list of its values", TypeError)
    said = "linear must be a Linear, got str: write Linear('one_sweep')"
    refused(lambda: head_of(linear="one_sweep"), said, TypeError)
    fp8 = head_of(linear=Linear(gradients="fp8"))
    refused(lambda: install(model_of(), fp8), "write Linear('one_sweep', gradients='fp8')")
    return {}


def true_vocabularies(group):
    """The check call has labels of the vocabulary that the head is told, whatever padding there is."""
    for vocab_size in (1, 2, V // 2, V - 26, V - 1, V, None):
        for fused in (True, False):
            head = head_of(vocab_size=vocab_size, options=Options(check=True))
            install(model_of(), head, fused=fused).remove()
    return {}


def metrics_of_depths(group):
    """A term of weight 0 is a metric of the depths' teacher and changes no bit of a loss; a step in
    the list of what was observed takes a depth's or the main head's."""
    seen, losses = [], []
    soft, logged = Distillation(1.0, "cross_entropy"), Distillation(0.0, "total_variation")
    for terms in ([soft], [soft, logged]):
        model = model_of(mtp=True)
        with install(model, head_of(depth_terms=terms, metrics="lse", observe=seen.append)):
            run(model)
            losses.append(run(model)[0])
    assert torch.equal(*losses) and len(seen) == 2 * 2 * 3
    for without, out in zip(seen[:6], seen[6:]):
        assert torch.equal(without.loss, out.loss)
    depths, last = 2, seen[6:]
    for d in (1, 2):
        of_depth = mean_metrics(last[d - 1 :: depths + 1])
        assert 0 < of_depth["loss/total_variation"] < 1
    main = mean_metrics(last[depths :: depths + 1])
    torch.testing.assert_close(main["loss"], losses[-1].mean().double().to(main["loss"].dtype))
    return {}


CASES = {
    "arguments of a head": arguments_of_a_head,
    "metrics of depths": metrics_of_depths,
    "assigned heads": assigned_heads,
    "classes with the mixin": classes_with_the_mixin,
    "blocks": blocks,
    "metrics over the vocabulary's group": metrics_over_the_vocabularys_group,
    "terms by themselves": terms_by_themselves,
    "observed": observed,
    "true vocabularies": true_vocabularies,
    "ranks that differ": ranks_that_differ,
    "arguments of another form": arguments_of_another_form,
}
