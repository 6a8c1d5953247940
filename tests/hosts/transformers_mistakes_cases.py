"""What users of transformers and TRL get wrong on two ranks: each mistake is an error on every rank
whose words say what to write, or means what its user expected. trainer_cases.py runs them."""

import contextlib
import inspect
import itertools
import tempfile
from functools import partial

import torch
import torch.distributed as dist
from cases import refused
from peft import LoraConfig, get_peft_model
from torch.nn import DataParallel
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    Trainer,
    TrainingArguments,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers_cases import CONFIGS, OWN_PLAN, batch, config_of, models, set_loss_function

from tp_headloss import (
    CausalLMLoss,
    CrossEntropy,
    HeadLoss,
    Linear,
    Options,
    Term,
    Transform,
    VocabShard,
    ZLoss,
)
from tp_headloss.integrations.replacement import replaced
from tp_headloss.integrations.transformers import causal_lm_loss, colwise_plan, fuse_head
from tp_headloss.integrations.transformers.model_parts import HEAD_ARGUMENTS
from tp_headloss.integrations.transformers.words import OF_TRL
from tp_headloss.integrations.trl import READ, fuse_log_probs
from tp_headloss.spec.aliases import ALIASES

INSTALL = {
    "fuse_head": fuse_head,
    "causal_lm_loss": set_loss_function,
    "fuse_log_probs": fuse_log_probs,
}


def given_to(name, **changes):
    """The arguments of a call of a model with this installation."""
    more = {"fused_lm_head": True} if name == "fuse_log_probs" else {}
    return {**batch(), **more, **changes}


def fused_model(name, kind="plain", plan="colwise"):
    _, model = models(kind, config_of(**CONFIGS[kind]), plan=plan)
    INSTALL[name](model)
    return model


# ---- evaluation


def evaluated(group):
    """Logits of an evaluation are those of the whole model, whatever the plan and the
    installation."""
    for name, kind, plan in itertools.product(
        ("fuse_head", "causal_lm_loss"), CONFIGS, ("colwise", None)
    ):
        if plan is None and (name == "causal_lm_loss" or kind not in OWN_PLAN):
            continue
        host, model = models(kind, config_of(**CONFIGS[kind]), plan=plan)
        INSTALL[name](model)
        inputs = batch(model.config.vocab_size)
        for m in (host.eval(), model.eval()):
            m.requires_grad_(False)
        with torch.no_grad():
            for call in (inputs, {**inputs, "return_dict": False}):
                ours, theirs = model(**call), host(**call)
                torch.testing.assert_close(ours[0], theirs[0])
                torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-4)
            counted = {**inputs, "num_items_in_batch": torch.tensor(7)}
            torch.testing.assert_close(model(**counted).loss, host(**counted).loss)
            no_labels = {"input_ids": inputs["input_ids"], "num_items_in_batch": 7}
            refused(
                lambda model=model, call=no_labels: model(**call),
                "in training, or with num_items_in_batch, must have labels",
            )
        columns = model.train()(**inputs).logits
        shard = VocabShard.from_group(group, model.config.vocab_size)
        assert columns is None or columns.shape[-1] == shard.width
    _, model = models("plain", config_of())
    with fuse_head(model, skip_logits=False):
        with torch.no_grad():
            assert model.eval()(**batch()).logits.shape[-1] == 512
        # where a gradient may be wanted of them
        refused(lambda: model.train()(**batch()), "must return all 512 columns of the logits")
    return {}


def accuracy(prediction):
    """A user's compute_metrics."""
    logits, labels = prediction.predictions, prediction.label_ids
    hits = (logits.argmax(-1)[:, :-1] == labels[:, 1:]) & (labels[:, 1:] != -100)
    return {
        "accuracy": hits.sum() / (labels[:, 1:] != -100).sum(),
        "columns": logits.shape[-1],
        "rows": len(logits),
    }


def metrics(group):
    """A Trainer's compute_metrics gives what it gives with transformers' own loss."""
    ids = batch()["input_ids"]
    host, own = models("plain", config_of(), plan=None)
    with torch.no_grad():  # labels that the model finds likeliest, every other one
        best = host(input_ids=ids).logits.argmax(-1).roll(1, -1)
    labels = torch.where(torch.arange(16) % 2 == 0, best, ids)
    rows = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels)]

    def evaluate(model, rows=rows):
        with tempfile.TemporaryDirectory() as folder:
            options = {"report_to": "none", "save_strategy": "no", "use_cpu": True}
            arguments = TrainingArguments(folder, per_device_eval_batch_size=2, **options)
            trainer = Trainer(model, arguments, eval_dataset=rows, compute_metrics=accuracy)
            found = trainer.evaluate()
        return {name: found[f"eval_{name}"] for name in ("loss", "accuracy", "columns", "rows")}

    expected = evaluate(own)
    assert 0.2 < expected["accuracy"] < 0.8 and expected["columns"] == 512, expected
    assert expected["rows"] == 4  # of two: each rank's
    # a last batch that is not full comes once, and counts half
    with torch.no_grad():
        one = float(host(input_ids=ids[:1], labels=labels[:1]).loss)
    uneven = evaluate(own, rows + rows[:1])
    assert uneven["rows"] == 5 and abs(uneven["loss"] - (4 * expected["loss"] + one) / 5) < 1e-4
    for name, plan in (
        ("causal_lm_loss", "colwise"),
        ("fuse_head", "colwise"),
        ("fuse_head", None),
    ):
        found = evaluate(fused_model(name, plan=plan))
        assert abs(found.pop("loss") - expected["loss"]) < 1e-4, (name, found, expected)
        assert found == {k: x for k, x in expected.items() if k != "loss"}, (name, found, expected)
    return {}


# ---- ranks that differ


def labels_differ(group):
    """Ranks with other labels, ids or masks: an error on all of them, and the next call is right."""
    model = fused_model("fuse_log_probs")
    inputs, rank = given_to("fuse_log_probs"), dist.get_rank()
    expected = model(**inputs).log_probs.detach()
    for seed in range(12):
        g = torch.Generator().manual_seed(seed)
        labels = inputs["labels"].clone()
        flat = labels.view(-1)
        n = int(torch.randint(1, 4, (), generator=g))
        places = torch.randperm(15, generator=g) + 17  # of the second row's labels
        ignored, moved = places[:n], places[n : 2 * n]
        if seed % 3 == 0:  # another number
            flat[ignored] = -100
        elif seed % 3 == 1:  # as many, of other tokens
            for r in range(2):
                if rank == r:
                    flat[(ignored, moved)[r]] = -100
        else:  # two labels changed places
            a, b = places[:2]
            flat[a], flat[b] = 3, 5
            if rank:
                flat[a], flat[b] = 5, 3
        if seed % 3 == 0 and rank:
            labels = inputs["labels"]
        refused(
            lambda labels=labels: model(**{**inputs, "labels": labels}),
            "ranks that share a vocabulary must have the same tokens and labels, got",
        )
    shifted = torch.full_like(inputs["labels"], -100)
    shifted[:, rank] = 4
    refused(
        lambda: model(**inputs, shift_labels=shifted),
        "other labels, 2 labels of 32 tokens on rank 1",
    )
    # of other sizes, with which collectives of the model's body would fail
    rows = {name: x[: 1 + rank] for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    refused(lambda: model(**{**inputs, **rows}), "labels of 16 tokens on rank 0 of the group and")
    torch.testing.assert_close(model(**inputs).log_probs, expected)
    return {}


DIFFERENT = {  # argument of an installation -> its values on both ranks
    "fuse_log_probs": {
        "temperature": (1.0, 0.5),
        "cast_lm_head_to_fp32": (False, True),
        "outputs": (("log_probs",), ("log_probs", "entropy")),
        "linear": (None, Linear(budget=1 << 20)),
    },
    "fuse_head": {
        "skip_logits": (None, True),
        "linear": (None, Linear("recompute")),
        "head_loss": (HeadLoss(), HeadLoss([CrossEntropy(), ZLoss(1e-4)])),
        "head_loss's metrics": (HeadLoss(), HeadLoss(metrics="accuracy")),
        "head_loss's ignore_index": (HeadLoss(), HeadLoss(ignore_index=3)),
        "transform": (Transform(), Transform(softcap=3.0)),
    },
}


def settings_differ(group):
    """Each argument of an installation that only one rank gives: an error on both ranks, which
    names it, and the model stays as it was."""
    for name, arguments in DIFFERENT.items():
        taken = {*inspect.signature(INSTALL[name]).parameters} - {"model", "shard", "observe"}
        # at fuse_log_probs the transform is compared by the same line
        assert taken <= {argument.split("'")[0] for argument in arguments} | {"transform"}, taken
        _, model = models("plain", config_of(), plan=None)
        for argument, values in arguments.items():
            key, value = argument.split("'")[0], values[dist.get_rank()]
            refused(
                lambda key=key, value=value, model=model, name=name: INSTALL[name](
                    model, **{key: value}
                ),
                "ranks must agree on ",
            )
            assert "forward" not in vars(model), argument
    return {}


WRONG = {  # argument of an installation -> a value that it refuses
    "head_loss": HeadLoss(reduction="none"),
    "linear": Linear(hidden_grad="reduce_scatter"),
    "transform": Transform(temperature=0.5),
}
RULED_OUT = {  # argument of an installation -> a value that its line rules out
    "head_loss": CrossEntropy,
    "linear": "recompute",
    "transform": 0.5,
    "temperature": -1.0,
    "cast_lm_head_to_fp32": "yes",
    "outputs": ("logps",),
    "skip_logits": "no",
    "observe": [],
}


def one_rank_refuses(group):
    """What is wrong on one rank alone, an argument or its model, is an error on both ranks, and the
    next installation is right."""
    rank = dist.get_rank()
    changes = {
        "_loss_function": lambda *args, **kwargs: torch.zeros(()),
        "forward": lambda *args, **kwargs: None,
    }
    for name in ("fuse_head", "fuse_log_probs"):
        _, model = models("plain", config_of())
        inputs = given_to(name)
        taken = WRONG.keys() & inspect.signature(INSTALL[name]).parameters.keys()
        wrong = taken - ({"transform"} if name == "fuse_head" else set())
        cases = [({}, {key: WRONG[key]}) for key in sorted(wrong)]
        by_lines = inspect.signature(INSTALL[name]).parameters.keys() - {"model", "shard"}
        cases += [({}, {key: RULED_OUT[key]}) for key in sorted(by_lines)]
        cases += [({key: value}, {}) for key, value in changes.items()]
        for bad, (attributes, arguments) in itertools.product((0, 1), cases):
            with contextlib.ExitStack() as stack:
                if rank == bad:
                    stack.enter_context(replaced(model, **attributes))
                given = arguments if rank == bad else {}
                refused(
                    lambda g=given: INSTALL[name](model, **g),  # noqa: B023
                    f"on rank {bad} of the group: ",
                    (TypeError, ValueError),
                )
            assert "forward" not in vars(model), (attributes, arguments)
        INSTALL[name](model)
        assert model(**inputs).loss.isfinite()
    return {}


# ---- words


def misspelt(word):
    """A word with each pair of letters swapped, each letter left out, and one too many."""
    n = range(len(word) - 1)
    found = {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in n}
    found |= {word[:i] + word[i + 1 :] for i in range(len(word))} | {f"{word}s", f"{word}_"}
    return sorted(found - {word})


def words(group):
    """A word of ours that no part of the call reads, and a misspelt one, is an error that says what
    to write."""
    for name in INSTALL:
        model, read = fused_model(name), READ if name == "fuse_log_probs" else HEAD_ARGUMENTS
        ours = ("denominator", "inputs", "token_weight")
        install = causal_lm_loss if name == "causal_lm_loss" else INSTALL[name]
        ours += tuple({*inspect.signature(install).parameters} - {"model"})
        ours += ("reduction", "metrics", "terms") if name != "fuse_log_probs" else ("head_inputs",)
        for word in ours:
            for more in ({}, {"num_items_in_batch": 7}):
                refused(
                    partial(model, **given_to(name, **more), **{word: 1}),
                    f"got the keyword {word!r}, which nothing reads: write ",
                    TypeError,
                )
        # one of each three, and of words that the call has not
        for word in {*read} - {*given_to(name)}:
            for wrong in misspelt(word)[::3]:
                refused(
                    partial(model, **given_to(name), **{wrong: 1}),
                    f"got the keyword {wrong!r}, which nothing reads: write {word}=",
                    TypeError,
                )
        # beside the right one
        for word in {*read} & {*given_to(name)}:
            refused(
                partial(model, **given_to(name), **{f"{word}_": given_to(name)[word]}),
                f"got the keyword '{word}_', which nothing reads: write {word}=",
                TypeError,
            )
        if name != "fuse_log_probs":
            refused(
                partial(model, **batch(), fused_lm_head=True),
                f"because {name} has no log-probs: fuse_log_probs(model) does",
                TypeError,
            )
        for wrong in misspelt("labels"):
            call = given_to(name)
            call[wrong] = call.pop("labels")
            for mode in (True, False):
                model.train(mode)
                refused(
                    partial(model, **call),
                    f"got the keyword {wrong!r}, which nothing reads: write labels=",
                    TypeError,
                )
        # the flag of TRL's head: without it the forward is the model's own, with another output
        for wrong in misspelt(OF_TRL)[::3]:
            refused(
                partial(model, **batch(), **{wrong: True}),
                f"got the keyword {wrong!r}, which nothing reads: write "
                + ("fused_lm_head=" if name == "fuse_log_probs" else "nothing, because"),
                TypeError,
            )
        model.train()
        # words of the model and of nobody else stay theirs
        for known in ({"use_cache": False}, {"output_attentions": True}, {"of_nobody": 1}):
            assert model(**given_to(name), **known).loss.isfinite()
        assert model(**given_to(name), denominator=None).loss.isfinite()
    return {}


def aliases(group):
    """Somebody else's word for ours, in each kind of call, is an error that says what to write."""
    names = {alias.name for alias in ALIASES if alias.of not in ("value", "term", "metric")}
    names |= {"num_items", "head_input", "skip_logits", "transform", "outputs"}
    assert len(names) > 60 and names > {"loss_mask", "weight", "advantages", "temperature", "beta"}
    for name in INSTALL:
        model, read = fused_model(name), READ if name == "fuse_log_probs" else HEAD_ARGUMENTS
        taken = {*inspect.signature(type(model).forward).parameters, *read, "attention_mask"}
        # transformers gives two to its loss_function, and its attention refuses the other
        taken |= {"vocab_size", "logits", "softcap"} if name == "causal_lm_loss" else set()
        for word in names - taken:
            refused(
                partial(model, **given_to(name), **{word: 1}),
                f"got the keyword {word!r}, which nothing reads: write ",
                TypeError,
            )
    says = {
        "num_items": "write num_items_in_batch=",
        "head_input": "write head_inputs=",
        "advantages": 'write head_inputs={"advantages": ..}',
        "old_log_probs": 'write head_inputs={"old_log_prob": ..}',
        "loss_mask": "write labels of -100",
        "label_smoothing": "write fuse_head(model, HeadLoss(CrossEntropy(label_smoothing=0.1)))",
        "group": "write fuse_head(model, shard=VocabShard.from_group(group, vocab_size))",
        "outputs": "fuse_log_probs(model, outputs=..) does",
        "dim": "logits are the model's own",
        "target": "write labels=",
    }
    model = fused_model("fuse_head")
    for word, said in says.items():
        refused(partial(model, **given_to("fuse_head"), **{word: 1}), said, TypeError)
    for given in (HeadLoss(), CrossEntropy()):  # by position, where the others take a HeadLoss
        refused(
            partial(fuse_log_probs, model, given), "write fuse_head(model, HeadLoss(..))", TypeError
        )
    for install in (fuse_head, causal_lm_loss):
        for terms in (CrossEntropy(), [CrossEntropy(), ZLoss(1e-4)]):
            said = f"must be a HeadLoss, got {type(terms).__name__}: write HeadLoss([..])"
            refused(partial(install, model, terms), said, TypeError)
    # an argument of another one of the three, at the installation
    for install, word, said in (
        (causal_lm_loss, "linear", "write fuse_head(model, linear=..)"),
        (fuse_head, "outputs", "write fuse_log_probs(model, outputs=..)"),
        (fuse_log_probs, "head_loss", "write fuse_head(model, head_loss=..)"),
        (causal_lm_loss, "labels", "write model.loss_function = causal_lm_loss(model, ..)"),
    ):
        refused(partial(install, model, **{word: 1}), said, TypeError)
    return {}


# ---- a loss that the model never calls


def plain():
    """A model of one rank."""
    return AutoModelForCausalLM.from_config(config_of())


def assigned(group):
    """A Module as loss_function, and a function on a wrapper: errors of all three ways, before and
    after an installation."""
    for loss, install in itertools.product((HeadLoss(), CausalLMLoss()), INSTALL.values()):
        model = plain()
        model.loss_function = loss
        refused(lambda i=install, m=model: i(m), "model.loss_function must be a function, got a ")
        del model.loss_function
        install(model)
        model.loss_function = loss
        more = {"fused_lm_head": True} if install is fuse_log_probs else {}
        refused(
            partial(model, **batch(), **more),
            f"must be a function, got a {type(loss).__name__}, which is a Module",
        )
    for wrap in (lambda m: get_peft_model(m, LoraConfig(target_modules=["q_proj"])), DataParallel):
        model = plain()
        wrapper = wrap(model)
        wrapper.loss_function = causal_lm_loss(model)
        refused(partial(wrapper, **batch()), "must be the loss_function of this LlamaForCausalLM")
        assert wrapper(input_ids=batch()["input_ids"]).logits.isfinite().all()
        if wrap is not DataParallel:
            for install in (fuse_head, fuse_log_probs):
                refused(lambda i=install, w=wrapper: i(w), "PeftModel.loss_function is not called")
        del wrapper.loss_function  # and nobody keeps the function
        assert wrapper(**batch()).loss.isfinite()
        model.loss_function = causal_lm_loss(model)
        assert wrapper(**batch()).loss.isfinite() and model.loss_function.calls == 1
        kept, model.loss_function = model.loss_function, ForCausalLMLoss
        assert wrapper(**batch()).loss.isfinite() and kept.calls == 1
        fresh, model.loss_function = causal_lm_loss(model), ForCausalLMLoss
        assert wrapper(**batch()).loss.isfinite() and not fresh.calls  # put back by name
    refused(
        lambda: causal_lm_loss(get_peft_model(plain(), LoraConfig(target_modules=["q_proj"]))),
        "base = model.get_base_model(), then base.loss_function = causal_lm_loss(base, ..)",
        TypeError,
    )
    for install in INSTALL.values():
        refused(lambda i=install: i(DataParallel(plain())), "model.module", TypeError)
    model = plain()
    model.loss_function = causal_lm_loss(model, HeadLoss([CrossEntropy(), ZLoss(1e-4)]))
    for install in (fuse_head, fuse_log_probs):
        refused(lambda i=install: i(model), "the model's loss_function must be transformers'")
        assert "forward" not in vars(model)
    model.loss_function = ForCausalLMLoss
    fuse_log_probs(model)
    model.loss_function = causal_lm_loss(model)
    refused(partial(model, **given_to("fuse_log_probs")), "must be transformers' ForCausalLMLoss")
    model = plain()
    loss = causal_lm_loss(model)
    out = model(input_ids=batch()["input_ids"])
    refused(lambda: loss(out, batch()["labels"]), "compute_loss_func", TypeError)
    model.loss_function = loss
    logits = model(input_ids=batch()["input_ids"]).logits
    refused(
        lambda: logits.sum().backward(), "model.loss_function(logits, labels) before the backward"
    )
    return {}


def unfit(group):
    """Models that cannot have a head say why: without weights, of NaN, of two dtypes, with a
    head."""

    def nan(model):
        model.lm_head.weight.data[3] = torch.nan

    def two_dtypes(model):
        model.bfloat16().lm_head.float()

    def meta(model):
        model.to("meta")

    for change, said in (
        (nan, "the model's own loss of a few tokens must be finite, got nan"),
        (two_dtypes, "the output layer must have the dtype of the hidden states, torch.bfloat16"),
        (meta, "load the weights first"),
        (fuse_head, "was replaced already, by FusedHead"),
        (fuse_log_probs, "was replaced already, by FusedLogProbs"),
    ):
        for install in (fuse_head, fuse_log_probs):
            model = plain()
            change(model)
            before = dict(vars(model))
            refused(lambda i=install, m=model: i(m), said)
            assert vars(model) == before
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    masked = BertForMaskedLM(BertConfig(vocab_size=64, intermediate_size=32, **sizes))
    refused(
        lambda: fuse_head(masked), "a causal one, whose own loss is ForCausalLMLoss, got a Bert"
    )
    changed = plain()
    changed.loss_function = lambda *args, **given: torch.zeros(())
    for install in (fuse_head, fuse_log_probs):
        refused(
            lambda i=install: i(changed),
            "from transformers.loss.loss_utils import ForCausalLMLoss; model.loss_function = For",
        )
        refused(
            lambda i=install: i(torch.compile(plain())),
            "torch.compile: compiled._orig_mod",
            TypeError,
        )
    refused(
        lambda: fuse_log_probs(plain(), transform=Transform(temperature=0.5)),
        "write fuse_log_probs(model, temperature=0.5)",
    )
    fused = fuse_log_probs(plain(), linear=Linear(max_valid_tokens=40))
    assert fused.linear.max_valid_tokens == 40
    return {}


# ---- what a loss is divided by, and shards


def counts(group):
    """Each way takes the same counts of tokens, and 0 gives 0."""
    one = 7 * torch.ones(())
    for name in INSTALL:
        model = fused_model(name)
        of = {
            n: float(model(**given_to(name, num_items_in_batch=x)).loss)
            for n, x in {7: 7, "float": 7.0, "tensor": one.long(), "two": one.expand(2)}.items()
        }
        assert max(of.values()) - min(of.values()) < 1e-6 and of[7] > 0, of
        for zero in (0, torch.tensor(0), torch.zeros(1)):
            assert float(model(**given_to(name, num_items_in_batch=zero)).loss) == 0
        for wrong, kind in (
            *((x, ValueError) for x in (-5, float("inf"), torch.tensor(-3), torch.tensor([-1.0]))),
            *((x, ValueError) for x in (torch.tensor([3, 4]), torch.ones(0))),
            *((x, TypeError) for x in ("7", True, [7], torch.tensor(True))),
        ):
            refused(
                partial(model, **given_to(name, num_items_in_batch=wrong)),
                "num_items_in_batch must be ",
                kind,
            )
    model = plain()
    fuse_head(model, HeadLoss(reduction="sum"))
    refused(partial(model, **batch(), num_items_in_batch=7), "reduction='sum' divides by nothing")
    assert model(**batch()).loss.isfinite()
    return {}


def counts_differ(group):
    """A rank with another count has another loss, as the docstring says, and full validation finds
    it."""
    count, losses = 7 + dist.get_rank(), [None, None]
    for options in (Options(), Options(validate="full")):
        for name in ("fuse_head", "causal_lm_loss"):
            _, model = models("plain", config_of())
            head_loss = HeadLoss(options=options)
            if name == "fuse_head":
                fuse_head(model, head_loss)
            else:
                model.loss_function = causal_lm_loss(model, head_loss)
            call = partial(model, **batch(), num_items_in_batch=count)
            if options.validate == "full":
                refused(call, "ranks must agree on denominator: rank 0 of the group has 7, got 8")
            else:
                dist.all_gather_object(losses, float(call().loss))
                assert abs(7 * losses[0] - 8 * losses[1]) < 1e-4 and losses[0] != losses[1]
    return {}


def weighted(group):
    """Class weights, and a count of tokens as the denominator."""
    weight = torch.rand(512, generator=torch.Generator().manual_seed(2)) + 0.5
    own = Term(
        "own", lambda stats: stats.lse, want=(), token_weight=lambda stats: stats.lse.detach()
    )
    losses = (
        HeadLoss([CrossEntropy(class_weight=weight)]),
        HeadLoss([ZLoss(1e-4), CrossEntropy(class_weight=weight)]),
        HeadLoss([own]),
    )
    inputs = batch()
    for head_loss, name in itertools.product(losses, ("fuse_head", "causal_lm_loss")):
        host, model = models("plain", config_of())
        if name == "fuse_head":
            fuse_head(model, head_loss)
        else:
            model.loss_function = causal_lm_loss(model, head_loss)
        for number, mode in itertools.product((7, torch.tensor(7)), (True, False)):
            refused(
                partial(model.train(mode), **inputs, num_items_in_batch=number),
                "num_items_in_batch counts tokens, and",
            )
        found = model.train()(**inputs).loss
        if head_loss is losses[0]:
            logits = host(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
            labels = inputs["labels"][:, 1:].flatten()
            torch.testing.assert_close(
                found, torch.nn.functional.cross_entropy(logits, labels, weight)
            )
    return {}


def other_vocabularies(group):
    """A shard of other ids than the output layer's, whose width may even fit."""
    _, model = models("plain", config_of())
    alone = AutoModelForCausalLM.from_config(config_of())
    for ids, install in itertools.product((500, 511), (fuse_head, fuse_log_probs)):
        for m, of in ((model, group), (alone, None)):
            shard = VocabShard.from_group(of, ids, padded_size=512)
            refused(
                lambda m=m, s=shard, f=install: f(m, shard=s), "shard= must have vocab_size=512"
            )
            assert "forward" not in vars(m)
    for m, of in ((model, group), (alone, None)):
        with fuse_head(m, shard=VocabShard.from_group(of, 512)):
            assert m(**batch()).loss.isfinite()
    return {}


def sharded_and_wrapped(group):
    """On this rank's columns, too: what the model would not call is an error before its own loss is
    computed."""
    _, model = models("plain", config_of())
    wrapper = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    wrapper.loss_function = causal_lm_loss(model)
    refused(partial(wrapper, **batch()), "must be the loss_function of this LlamaForCausalLM")
    model.loss_function = HeadLoss()
    refused(partial(model, **batch()), "must be a function, got a HeadLoss, which is a Module")
    return {}


def plan_alone(group):
    """A `colwise_plan` without a loss: torch's error that the docstring quotes, and no other."""
    _, model = models("plain", config_of())
    says = "Expected input batch_size (16) to match target batch_size (32)"
    refused(lambda: model(**batch()), says)
    assert says.replace("16", "..").replace("32", "..") in " ".join(colwise_plan.__doc__.split())
    set_loss_function(model)
    assert model(**batch()).loss.isfinite()
    return {}


CASES = {
    "evaluated": evaluated,
    "metrics": metrics,
    "labels differ": labels_differ,
    "settings differ": settings_differ,
    "one rank refuses": one_rank_refuses,
    "words": words,
    "aliases": aliases,
    "assigned": assigned,
    "unfit": unfit,
    "counts": counts,
    "counts differ": counts_differ,
    "weighted": weighted,
    "other vocabularies": other_vocabularies,
    "sharded and wrapped": sharded_and_wrapped,
    "plan alone": plan_alone,
}
