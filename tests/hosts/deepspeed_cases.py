"""The losses and gradients of tiny transformers models under DeepSpeed AutoTP on two ranks, against
the same models unsharded with their own loss, step by step."""

import copy
import os
import sys
from functools import partial
from unittest import mock

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed_module_cases
import torch
import torch._inductor.compile_fx  # once: DeepSpeed imports it in each rank, for 3 s
import torch.distributed as dist
import transformers
from cases import compared, fails_cleanly_at_every_step, main, refused, relative_errors, worst
from deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from deepspeed.utils import logger, safe_get_full_grad
from pages import marked_block

from tp_headloss import CrossEntropy, HeadLoss, VocabShard, ZLoss
from tp_headloss.integrations.transformers import causal_lm_loss, fuse_head
from tp_headloss.integrations.transformers.model_facts import head_shard

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # which compiles C++
logger.setLevel("ERROR")
LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": 512,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **IDS,
    **LAYERS,
}
LEARNING_RATE = 2.0**-4
KINDS = {"plain": {}, "tied": {"tie_word_embeddings": True}, "uneven": {"vocab_size": 509}}


def unsharded(kind="Llama", **changes):
    """A model with random weights, wide enough that the softmax is far from uniform; the same on
    both ranks."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.dim() == 2 else 1).add_(0.01 * torch.randn_like(p))
    return model.train()


def engine_of(model, stage=0, vocab_parallel=True, learning_rate=LEARNING_RATE, **config):
    """A DeepSpeed engine of a copy of the model, tensor parallel, with plain SGD."""
    model = copy.deepcopy(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": vocab_parallel},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        **config,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def batch(vocab=512, seed=1, ignored=5):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (2, 16), generator=g)
    labels = ids.clone()
    labels[0, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def own_rows(whole, mine):
    """This rank's part of a tensor that two ranks share along the one dimension on which the shapes
    differ."""
    for dim, (size, width) in enumerate(zip(whole.shape, mine.shape)):
        if size != width:
            return whole.narrow(dim, 0 if dist.get_rank() == 0 else size - width, width)
    return whole


def parts(host, model, value):
    """value(parameter) of each parameter of the unsharded model, this rank's part, by name."""
    mine = dict(model.named_parameters())
    return {name: own_rows(value(p), mine[name]) for name, p in host.named_parameters()}


def gradients(model):
    found = {
        n: p.grad if p.grad is not None else safe_get_full_grad(p)
        for n, p in model.named_parameters()
    }
    return {
        n: g.detach().clone().view(dict(model.named_parameters())[n].shape)
        for n, g in found.items()
    }


def head_name(model):
    return next(n for n, p in model.named_parameters() if p is model.get_output_embeddings().weight)


def step(engine, host, inputs, **call):
    """One step of the engine, and the same one of the unsharded model -> `compared`, of gradients
    and new weights."""
    model = engine.module
    loss = engine(**inputs, **call).loss
    engine.backward(loss)
    grads = gradients(model)
    host.zero_grad()
    host_loss = host(**inputs, **call).loss
    host_loss.backward()
    result = compared(
        loss.detach(),
        grads,
        host_loss.detach(),
        parts(host, model, lambda p: p.grad),
        head_name(model),
    )
    engine.step()
    with torch.no_grad():
        for p in host.parameters():
            p -= LEARNING_RATE * p.grad
    weights = {n: p.detach() for n, p in model.named_parameters()}
    errors = relative_errors(weights, parts(host, model, torch.Tensor.detach))
    return {**result, "weights": max(errors.values())}


# ---- both ways, and DeepSpeed's own loss, on one trajectory


def steps(group, kind, stage):
    host = unsharded(**KINDS[kind])
    engine = engine_of(host, stage)
    model, vocab = engine.module, host.config.vocab_size
    assert tuple(model.lm_head.weight.shape) == (
        (vocab + 1) // 2 - (vocab % 2) * dist.get_rank(),
        32,
    )
    theirs = model.loss_function
    results = [step(engine, host, batch(vocab))]  # DeepSpeed's own
    ours = model.loss_function = causal_lm_loss(model, HeadLoss(metrics=("accuracy",)))
    assert ours.shard == head_shard(model) and ours.shard.tp_invariant == (vocab == 512)
    for call in {}, {"num_items_in_batch": torch.tensor(40)}:
        results.append(step(engine, host, batch(vocab, seed=2), **call))
    assert ours.last.count == 26 and 0 <= ours.last.metrics["accuracy"] <= 26
    model.loss_function = theirs
    # which is not called
    with fuse_head(model) as fused, mock.patch.object(model.lm_head, "forward", None):
        for call in {}, {"num_items_in_batch": 40}:
            results.append(step(engine, host, batch(vocab, seed=3), **call))
        assert fused.last.count == 26 and engine(**batch(vocab)).logits is None
    assert engine(**batch(vocab)).logits.shape[-1] == model.lm_head.weight.shape[0]
    return {**worst(results), "theirs": results[0]["grads"]}


def gathered(group):
    """An output layer that is sharded and gathers its logits: the fused head, generate()."""
    host = unsharded()
    engine = engine_of(host, vocab_parallel=False)
    model, ids = engine.module, batch()["input_ids"]
    assert model.lm_head.weight.shape[0] == 256
    with fuse_head(model):
        results = [step(engine, host, batch(seed=seed)) for seed in (1, 2)]
        engine.eval(), host.eval()
        torch.testing.assert_close(
            engine(input_ids=ids).logits, host(input_ids=ids).logits, rtol=1e-4, atol=1e-4
        )
        assert torch.equal(
            *(m.generate(ids, max_new_tokens=4, do_sample=False) for m in (model, host))
        )
    model.loss_function = causal_lm_loss(model)
    refused(lambda: engine(**batch()), "vocab_parallel_lm_head in DeepSpeed")
    return worst(results)


def other_models(group):
    """A bias and a scale of the logits, and tied embeddings that DeepSpeed shards unasked, or
    leaves whole."""
    tied = {"tie_word_embeddings": True}
    tries = [
        (unsharded("Phi"), True, 256),
        (unsharded("Granite", logits_scaling=4.0), True, 256),
        (unsharded(**tied), None, 256),
        (unsharded(**tied), False, 512),
    ]
    results = []
    for host, vocab_parallel, rows in tries:
        engine = engine_of(host, vocab_parallel=vocab_parallel)
        assert engine.module.lm_head.weight.shape[0] == rows
        with fuse_head(engine.module):
            results.append(step(engine, host, batch()))
    return worst(results)


def linear(group):
    """HeadLoss.linear beside DeepSpeed's own vocab_parallel_linear_cross_entropy, on the same
    shard."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 16, 32), torch.randn(509, 32)
    shard = VocabShard.from_group(group, 509)
    labels = batch(509)["labels"]

    def run(loss):
        h = hidden.clone().requires_grad_()
        w = weight[shard.start : shard.stop].clone().requires_grad_()
        value = loss(h, w)
        value.backward()
        return value.detach(), {"dH": h.grad, "dW": w.grad}

    bounds = {"vocab_start_index": shard.start, "vocab_end_index": shard.stop}
    ours = run(lambda h, w: HeadLoss().linear(h, w, labels, shard=shard).loss)
    theirs = run(
        lambda h, w: vocab_parallel_linear_cross_entropy(h, w, labels, tp_group=group, **bounds)
    )
    return compared(*ours, *theirs, "dW")


# ---- what num_items_in_batch must be

# The rate is large, so that a weight's change is more than its rounding.
CLIPPED = {"gradient_clipping": 0.5, "learning_rate": 64.0}


def micro_batches(group):
    """gradient_accumulation_steps: the mean over both micro-batches, of unequal numbers of tokens,
    needs half of their tokens as the denominator."""
    host = unsharded()
    engine = engine_of(host, gradient_accumulation_steps=2, **CLIPPED)
    inputs = [batch(seed=1, ignored=1), batch(seed=2, ignored=14)]
    tokens = sum(int((x["labels"][:, 1:] != -100).sum()) for x in inputs)
    with fuse_head(engine.module):
        return averaged(engine, host, inputs, inputs, tokens, tokens / 2)


def data_parallel(group):
    """Two data-parallel ranks, each with its own batch: the mean over both needs half of their
    tokens, too."""
    host = unsharded()
    engine = engine_of(host, tensor_parallel={}, **CLIPPED)
    inputs = [batch(seed=1, ignored=1), batch(seed=2, ignored=14)]
    tokens = sum(int((x["labels"][:, 1:] != -100).sum()) for x in inputs)
    with fuse_head(engine.module):
        return averaged(engine, host, [inputs[dist.get_rank()]], inputs, tokens, tokens / 2)


def averaged(engine, host, mine, everybodys, tokens, denominator):
    """The step of an engine with clipping, against that of the unsharded model's mean over all
    tokens -> `compared` of the changes of the weights, and of the sum of the losses."""
    before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    total = torch.zeros(())
    for inputs in mine:
        loss = engine(**inputs, num_items_in_batch=denominator).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    if len(mine) < len(everybodys):
        dist.all_reduce(total)
    host_loss = sum(host(**inputs, num_items_in_batch=tokens).loss for inputs in everybodys)
    host_loss.backward()
    assert torch.nn.utils.clip_grad_norm_(host.parameters(), CLIPPED["gradient_clipping"]) > 1
    change = {
        n: (before[n] - p.detach()) / CLIPPED["learning_rate"]
        for n, p in engine.module.named_parameters()
    }
    expected = parts(host, engine.module, lambda p: p.grad)
    return compared(total / 2, change, host_loss.detach(), expected, head_name(engine.module))


# ---- what is refused


def refusals(group):
    engine = engine_of(unsharded())
    model, ids = engine.module, batch()["input_ids"]
    refused(lambda: fuse_head(engine), "engine.module", TypeError)
    wrong = VocabShard(0, 256, 512, group) if dist.get_rank() else VocabShard(256, 512, 512, group)
    for install in (fuse_head, causal_lm_loss):
        refused(
            partial(install, model, shard=wrong),
            "holds ids [0, 256)" if dist.get_rank() == 0 else "[256, 512)",
        )
    right = VocabShard.from_group(model.lm_head.mp_group, 512)
    fuse_head(model, shard=right).remove()
    fused = fuse_head(model, HeadLoss([CrossEntropy(), ZLoss(1e-4)]))
    refused(partial(model, ids), "must have labels")
    with torch.no_grad():
        refused(partial(model.eval(), ids), "vocab_parallel_lm_head=false")
    fused.remove()
    assert fails_cleanly_at_every_step(lambda: fuse_head(model), model) > 30
    model.loss_function = causal_lm_loss(model)
    refused(lambda: fuse_head(model), "VocabParallelCausalLMLoss")
    return {}


def zero3(group):
    """ZeRO stage 3 leaves the loss of this rank's logits, and no rows for a fused head."""
    host = unsharded()
    engine = engine_of(host, stage=3)
    model, inputs = engine.module, batch()
    refused(lambda: fuse_head(model), "ZeRO stage 3")
    model.loss_function = causal_lm_loss(model)
    loss = engine(**inputs).loss
    engine.backward(loss)
    host_loss = host(**inputs).loss
    host_loss.backward()
    whole = {n: torch.empty(p.ds_shape) for n, p in model.named_parameters()}
    expected = {n: own_rows(p.grad, whole[n]) for n, p in host.named_parameters()}
    grads = {n: safe_get_full_grad(p).clone() for n, p in model.named_parameters()}
    return compared(loss.detach(), grads, host_loss.detach(), expected, head_name(model))


def readme(group):
    config = {
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "train_micro_batch_size_per_gpu": 2,
    }
    names = {**globals(), "model": unsharded(), "config": config, "tokens": 26, **batch()}
    exec(compile(marked_block("host", "deepspeed"), "docs", "exec"), names)
    last, grads = names["fused"].last, gradients(names["engine"].module)
    assert 0 <= last.metrics["accuracy"] <= last.count == 26 and all(
        g.norm() > 0 for g in grads.values()
    )
    return {}


CASES = {
    "data parallel": data_parallel,  # first: DeepSpeed keeps the groups of tensor parallelism
    **{
        f"{kind}-stage{stage}": partial(steps, kind=kind, stage=stage)
        for kind in KINDS
        for stage in (0, 1)
    },
    "plain-stage2": partial(steps, kind="plain", stage=2),
    "gathered": gathered,
    "linear": linear,
    "other models": other_models,
    "README": readme,
    "micro-batches": micro_batches,
    "zero3": zero3,
    "refusals": refusals,
}

if __name__ == "__main__":
    main({2: CASES, 4: deepspeed_module_cases.CASES})
