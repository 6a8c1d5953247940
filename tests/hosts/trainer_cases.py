"""The trainers of transformers and TRL from their arguments to the last step: what they log and all
gradients, with their own loss of the sharded model and with ours, on two ranks (tensor parallel)
and on four (FSDP x tensor parallel).

Replaced for a CPU: accelerate does not count CPUs as devices of a tensor parallel model. Replaced
for GRPO and RLOO: they seed each rank differently, and ranks of one tensor parallel model would
continue different texts.
"""

import os
import tempfile
from functools import cache, partial

import accelerate
import torch
import torch.distributed as dist
from cases import FULL, main, number_of_ranks, relative_errors
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers_cases import (
    CONFIGS,
    OWN_PLAN,
    batch,
    config_of,
    refused,
    saved,
    set_loss_function,
    whole,
)

from tp_headloss.integrations import installed_version
from tp_headloss.integrations.transformers import colwise_plan, fuse_head

accelerate.Accelerator.multi_device = property(lambda self: self.use_distributed)
TRL = installed_version("trl") is not None
if TRL:
    import trl
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from preset_cases import CASES as PRESET_CASES
    from transformers_mistakes_cases import CASES as MISTAKES

    from tp_headloss.integrations.trl import fuse_log_probs


def begin(group):
    os.environ |= {"LOCAL_WORLD_SIZE": str(number_of_ranks()), "MASTER_ADDR": "localhost"}


STEPS = 2
OPTIONS = {
    **{
        "max_steps": STEPS,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    },
    **{
        "optim": "sgd",
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "seed": 0,
    },
    "logging_steps": 1,
}
TRL_OPTIONS = {"per_device_train_batch_size": 4, "bf16": False, "gradient_checkpointing": False}
TIMES = "_time", "_runtime", "_per_second"


def model_of(kind="plain", plan=None):
    """Tensor parallel over two ranks, and sharded by FSDP over the others."""
    config = config_of(**CONFIGS[kind])
    if plan == "colwise":
        plan = colwise_plan(AutoModelForCausalLM._model_mapping[type(config)], config)
    options, ranks = {"tp_size": 2, "tp_plan": plan}, number_of_ranks()
    if ranks > 2:
        options["fsdp_size"] = ranks // 2
    return AutoModelForCausalLM.from_pretrained(
        saved(kind, config), dtype=torch.float32, distributed_config=DistributedConfig(**options)
    )


class Steps(TrainerCallback):
    """Gradients of each step; one seed of each tensor parallel model."""

    def __init__(self):
        self.gradients = {}

    def on_step_begin(self, args, state, control, **_):
        torch.manual_seed(10 * (dist.get_rank() // 2) + state.global_step)

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        step = {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
        self.gradients |= {f"{state.global_step}:{name}": grad for name, grad in step.items()}


def trained(trainer):
    """-> what was logged in each step, gradients by step and name."""
    steps = Steps()
    trainer.add_callback(steps)
    trainer.train()
    logs = [
        {
            name: x
            for name, x in entry.items()
            if isinstance(x, (int, float)) and not name.endswith(TIMES)
        }
        for entry in trainer.state.log_history
    ]
    assert len(logs) > STEPS and len({name[0] for name in steps.gradients}) == STEPS
    return logs, steps.gradients


def errors(result, theirs, head="lm_head.weight"):
    """The worst of all that was logged (relative, and absolute below 1, because rewards are
    differences) and of all gradients; "mutant": were the gradient of `head` one percent too
    large."""
    (logs, gradients), (their_logs, their_gradients) = result, theirs
    assert [entry.keys() for entry in logs] == [entry.keys() for entry in their_logs]
    found = relative_errors(gradients, their_gradients)
    return {
        "loss": max(
            abs(x - entry[name]) / max(1.0, abs(x))
            for their_entry, entry in zip(their_logs, logs, strict=True)
            for name, x in their_entry.items()
        ),
        "grads": max(found.values()),
        "mutant": relative_errors(
            {head: 1.01 * gradients[f"0:{head}"]}, {head: their_gradients[f"0:{head}"]}
        )[head],
    }


# ---- transformers


def rows():
    g = torch.Generator().manual_seed(1)
    found = [{"input_ids": torch.randint(0, 509, (12,), generator=g)} for _ in range(16)]
    for n, row in enumerate(found):
        row["labels"] = row["input_ids"].where(torch.arange(12) > n % 8, -100)
    return found


def transformers_run(model, accumulate=1):
    sizes = {
        "per_device_train_batch_size": 4 // accumulate,
        "gradient_accumulation_steps": accumulate,
    }
    arguments = TrainingArguments(tempfile.gettempdir(), **OPTIONS, **sizes)
    return trained(Trainer(model, arguments, train_dataset=rows()))


@cache
def transformers_host(kind):
    return transformers_run(model_of(kind))


def same_as_transformers(group, install, kind="plain", accumulate=1):
    model = model_of(kind, "colwise" if install is set_loss_function else None)
    install(model)
    head = next(n for n, p in model.named_parameters() if p is model.get_output_embeddings().weight)
    return errors(transformers_run(model, accumulate), transformers_host(kind), head)


def evaluated(group):
    """Losses and texts of a model that FSDP shards, call after call, beside the whole model's."""
    model, whole_model = (
        model_of(),
        AutoModelForCausalLM.from_pretrained(saved("plain", config_of())),
    )
    ids, options = batch()["input_ids"], {"max_new_tokens": 4, "do_sample": False}
    with fuse_head(model), torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(**batch()).loss, whole_model(**batch()).loss)
            assert torch.equal(model.generate(ids, **options), whole_model.generate(ids, **options))
    return {}


# ---- TRL


def words(count, g):
    return " ".join(f"w{n}" for n in torch.randint(3, 512, (count,), generator=g).tolist())


def texts(*columns):
    """Rows of text; a column is a name and a number of words, or for "label" of booleans."""
    g = torch.Generator().manual_seed(1)
    found = [
        {name: " " + words(count + n % 2, g) for name, count in columns if count} for n in range(16)
    ]
    for n, row in enumerate(found):
        row |= {name: n % 2 == 0 for name, count in columns if not count}
    return Dataset.from_list(found)


def tokenizer():
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{n}": n for n in range(3, 512)}}
    found = Tokenizer(WordLevel(vocab, unk_token="<pad>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def reward(completions, **_):
    return [
        float(sum(int(word[1:]) for word in text.split() if word[0] == "w") % 7)
        for text in completions
    ]


def trl_trainer(name, make=None, **options):
    """A trainer of a model and, if it has one, of a reference model. make: of the model."""
    columns = {
        "SFT": [("prompt", 4), ("completion", 6)], "DPO": [("prompt", 4), ("chosen", 6), ("rejected", 5)],
        "KTO": [("prompt", 4), ("completion", 6), ("label", 0)], "GRPO": [("prompt", 4)], "RLOO": [("prompt", 4)],
    }[name]  # fmt: skip
    config = getattr(trl, f"{name}Config")(
        tempfile.gettempdir(), **OPTIONS, **TRL_OPTIONS, **options
    )
    make = model_of if make is None else make
    more = {"ref_model": model_of()} if name in ("DPO", "KTO") and make is model_of else {}
    if name in ("GRPO", "RLOO"):
        more["reward_funcs"] = reward
    return getattr(trl, f"{name}Trainer")(
        make(), args=config, train_dataset=texts(*columns), processing_class=tokenizer(), **more
    )


def same_as_trl(group, name, head="lm_head.weight", **options):
    theirs, trainer = trained(trl_trainer(name, **options)), trl_trainer(name, **options)
    fuse_log_probs(trainer.model)
    if getattr(trainer, "ref_model", None) is not None:
        fuse_log_probs(trainer.ref_model)
    return errors(trained(trainer), theirs, head)


# ---- PEFT


ADAPTER = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"


def adapted(*modules):
    model = model_of()
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=4, target_modules=modules, init_lora_weights=False))


def adapters(group):
    """LoRA beside the output layer is trained; LoRA of a sharded output layer is refused by
    name."""
    theirs, model = transformers_run(adapted("q_proj", "v_proj")), adapted("q_proj", "v_proj")
    fuse_head(model)
    refused(
        lambda: fuse_head(adapted("lm_head")), "leave 'lm_head' out of target_modules", TypeError
    )
    return errors(transformers_run(model), theirs, ADAPTER)


FUSED, GRPO = (
    partial(same_as_transformers, install=fuse_head),
    {"num_generations": 4, "max_completion_length": 4},
)
TRL_CASES = {2: ("SFT", "SFT, PEFT", "DPO, PEFT", "RLOO"), 4: ("DPO", "GRPO")}
if FULL:
    TRL_CASES[2] += ("DPO", "GRPO")
    TRL_CASES[4] += ("SFT",)
CASES = {
    2: {
        "fused": FUSED,
        "fused-tied": partial(FUSED, kind="tied", accumulate=2),
        "loss_function": partial(
            same_as_transformers, install=set_loss_function, kind=OWN_PLAN[-1]
        ),
    },
    4: {
        "fused": FUSED,
        "fused-tied": partial(FUSED, kind="tied"),
        "loss_function": partial(same_as_transformers, install=set_loss_function),
        "evaluated": evaluated,
    },
}
if TRL:
    # in the process that has imported TRL and PEFT
    CASES[2] |= {f"mistake: {name}": case for name, case in MISTAKES.items()}
    CASES[2] |= {"PEFT": adapters, "KTO": partial(same_as_trl, name="KTO"), **PRESET_CASES}
    # DPO: takes log_sum_sq_probs
    several = {"SFT": {}, "DPO": {"use_weighting": True}, "GRPO": GRPO, "RLOO": GRPO}
    adapters_of = partial(adapted, "q_proj", "v_proj")
    several["SFT, PEFT"] = {"name": "SFT", "make": adapters_of, "head": ADAPTER}
    several["DPO, PEFT"] = {"name": "DPO", "make": adapters_of, "head": ADAPTER}
    for ranks, names in TRL_CASES.items():
        CASES[ranks] |= {
            name: partial(same_as_trl, **{"name": name} | several[name]) for name in names
        }


if __name__ == "__main__":
    main(CASES, begin)
