"""What can happen to a model after an adapter was installed on it: every adapter, every way.

Each pair ends with the right loss, in float64 from the weights that the call should have used, or
in an error of this package whose words name the cause."""

import copy
import functools
import itertools
import os
import pickle
import tempfile
import types
from unittest import mock

import torch
import torch.nn.functional as F
from cases import FULL, main
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from tp_headloss import CrossEntropy, HeadLoss, ZLoss
from tp_headloss.integrations import installed_version
from tp_headloss.integrations.transformers import causal_lm_loss, fuse_head
from tp_headloss.integrations.transformers.copies import ENTRIES

V, Z = 128, 0.1
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
IDS = torch.arange(24).view(2, 12) * 7 % V
HAS_TRL = installed_version("trl") is not None


def new_model():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=V, num_key_value_heads=2, **SIZES))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def head_loss():
    return HeadLoss([CrossEntropy(), ZLoss(Z)])


def set_loss_function(model):
    model.loss_function = causal_lm_loss(model, head_loss())
    return model.loss_function


def fuse_log_probs(model):
    from tp_headloss.integrations import trl

    return trl.fuse_log_probs(model)


ADAPTERS = {
    "fuse_head": lambda model: fuse_head(model, head_loss()),
    "causal_lm_loss": set_loss_function,
    **({"fuse_log_probs": fuse_log_probs} if HAS_TRL else {}),
}


def called(adapter, model):
    """The loss of a call, as a user makes it."""
    more = {"fused_lm_head": True} if adapter == "fuse_log_probs" else {}
    return model(input_ids=IDS, labels=IDS, **more).loss


def truth(adapter, state, dtype=torch.float64):
    """The loss of these weights in float64, without an adapter."""
    vocab = state["lm_head.weight"].shape[0]
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, num_key_value_heads=2, **SIZES)).double()
    model.load_state_dict({name: x.double() for name, x in state.items()})
    with torch.no_grad():
        logits = model(input_ids=IDS).logits[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, IDS[:, 1:].flatten())
    if adapter not in ("fuse_log_probs", "none"):
        loss = loss + Z * logits.logsumexp(-1).square().mean()
    return float(loss)


# ---- ways: a function (model, what the adapter returned) -> the model to call, and the weights
# that it should use


def state_of(model):
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def through_torch_save(model, installed):
    with tempfile.TemporaryFile() as file:
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False), state_of(model)


def after_a_change_of_the_original(copied, model):
    """The copy must not compute with the weights of the model that it was made from."""
    state = state_of(copied)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    return copied, state


def as_data_parallel_replica(model, installed):
    """As `torch.nn.parallel.replicate` makes it on a GPU, with weights of its own."""
    modules = list(model.modules())
    copies = {module: module._replicate_for_data_parallel() for module in modules}
    state = {name: x + 0.1 for name, x in state_of(model).items()}
    names = {p: name for name, p in model.named_parameters()}
    for module, replica in copies.items():
        for name, child in module._modules.items():
            setattr(replica, name, copies.get(child))
        for name, p in module._parameters.items():
            replica._parameters.pop(name, None)
            setattr(replica, name, None if p is None else state[names[p]].clone().requires_grad_())
    return copies[model], state


def ddp(model, installed):
    return DistributedDataParallel(model), state_of(model)


def fsdp(model, installed):
    state = state_of(model)
    for part in (model.lm_head, model.model.layers[0], model):
        fully_shard(part)
    return model, state


def compiled(model, installed):
    # what follows Dynamo is the same for every model: tests/engine/test_compile.py
    return torch.compile(model, backend="eager"), state_of(model)


def in_bf16(model, installed):
    return model.to(torch.bfloat16), state_of(model)


def resized(model, installed):
    model.resize_token_embeddings(V + 5, mean_resizing=False)
    return model, state_of(model)


def reloaded(adapter):
    def way(model, installed):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = LlamaForCausalLM.from_pretrained(folder)
        ADAPTERS[adapter](again)
        return again, state_of(model)

    return way


def wrapped_on_top(model, installed):
    """By a library that calls the forward which was there."""
    inner = model.forward

    @functools.wraps(inner)
    def outer(*args, **kwargs):
        return inner(*args, **kwargs)

    model.forward = outer
    return model, state_of(model)


def replaced_on_top(model, installed):
    """By a library that computes its own loss, and never calls the forward which was there."""

    def own(self, input_ids, labels, **kwargs):
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden)[:, :-1].flatten(0, 1)
        return types.SimpleNamespace(
            loss=F.cross_entropy(logits, labels[:, 1:].flatten()), logits=None
        )

    model.forward = types.MethodType(own, model)
    return model, state_of(model)


def trl_on_top(model, installed):
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)
    return functools.partial(model, fused_lm_head=True), state_of(model)


def adapter_on_top(model, installed):
    fuse_head(model, head_loss())
    return model, state_of(model)


def prepared(model, installed):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    with mock.patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
        return Accelerator(mixed_precision="bf16", cpu=True).prepare_model(
            model, device_placement=False
        ), state_of(model)


def prepared_then(way):
    return lambda model, installed: way(prepared(model, installed)[0], installed)


def offloaded(model, installed):
    from accelerate import cpu_offload

    state = state_of(model)
    return cpu_offload(model, execution_device=torch.device("cpu")), state


def evaluated(model, installed):
    model.eval()
    with torch.no_grad():
        model(input_ids=IDS, labels=IDS)
        model(input_ids=IDS)
    return model.train(), state_of(model)


def removed(model, installed):
    if hasattr(installed, "remove"):
        installed.remove()
    else:
        model.loss_function = ForCausalLMLoss
    return model, state_of(model)


def pickled(model, installed):
    return pickle.loads(pickle.dumps(model)), state_of(model)


def output_layer_replaced(model, installed):
    layer = model.get_output_embeddings()
    stock = layer.forward
    layer.forward = lambda hidden: stock(hidden)
    return model, state_of(model)


def class_replaced(model, installed):
    """By one with a forward of its own, as monkey patches of a class do."""

    class Other(type(model)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.__class__ = Other
    return model, state_of(model)


# name -> (function, words of the error by adapter; an adapter that is not there gives the right
# loss)
NOT_OURS = "the model without an adapter has another loss as well"
FUSED = ("fuse_head", "fuse_log_probs")
PAST = dict.fromkeys(FUSED, "and is not called") | {
    "causal_lm_loss": "does not call its loss_function"
}
WAYS = {
    "nothing": (lambda model, installed: (model, state_of(model)), {}),
    "pickle": (lambda m, i: after_a_change_of_the_original(pickled(m, i)[0], m), {}),
    "pickle twice": (lambda m, i: pickled(pickled(m, i)[0], i), {}),
    "torch.save": (through_torch_save, {}),
    "deepcopy": (lambda m, i: after_a_change_of_the_original(copy.deepcopy(m), m), {}),
    "copy": (lambda m, i: (copy.copy(m), state_of(m)), {}),
    "pickle of a deepcopy": (
        lambda m, i: after_a_change_of_the_original(pickled(copy.deepcopy(m), i)[0], m),
        {},
    ),
    "replica": (as_data_parallel_replica, {}),
    "replica of a deepcopy": (lambda m, i: as_data_parallel_replica(copy.deepcopy(m), i), {}),
    "DDP": (ddp, {}),
    "FSDP2": (fsdp, {}),
    "compile": (compiled, {}),
    "to(bfloat16)": (in_bf16, {}),
    "resize_token_embeddings": (resized, {"causal_lm_loss": "if the vocabulary was resized"}),
    "save_pretrained": (None, {}),
    "wrapped on top": (wrapped_on_top, {}),
    "wrapped, then a replica": (
        lambda m, i: as_data_parallel_replica(*wrapped_on_top(m, i)),
        dict.fromkeys(FUSED, "nn.DataParallel copies a model on whose head")
        | {"causal_lm_loss": NOT_OURS},
    ),
    "replaced on top": (replaced_on_top, PAST),
    "output layer replaced": (
        output_layer_replaced,
        dict.fromkeys(FUSED, "of the output layer"),
    ),
    "class replaced": (class_replaced, dict.fromkeys(FUSED, "the model's class has")),
    "another adapter on top": (
        adapter_on_top,
        dict.fromkeys(FUSED, "replaced already") | {"causal_lm_loss": "loss_function must be"},
    ),
    "accelerate": (prepared, {}),
    "accelerate, then pickle": (
        prepared_then(pickled),
        dict.fromkeys(FUSED, "unwrap the model first"),
    ),
    "accelerate, then deepcopy": (prepared_then(lambda m, i: (copy.deepcopy(m), state_of(m))), {}),
    "cpu_offload": (offloaded, dict.fromkeys(FUSED, "accelerate's hooks")),
    "eval, then train": (evaluated, {}),
    "remove": (removed, {}),
    **({"TRL on top": (trl_on_top, PAST)} if HAS_TRL else {}),
}


def outcome(adapter, way):
    """AssertionError for a wrong loss, a foreign error, and one that names another cause."""
    function, words = WAYS[way]
    if words.get(adapter) is NOT_OURS:
        return {}
    model = new_model()
    installed = ADAPTERS[adapter](model)
    function = reloaded(adapter) if way == "save_pretrained" else function
    try:
        wrapped, state = function(model, installed)
        loss = called(adapter, wrapped)
    except (ValueError, RuntimeError) as error:
        assert adapter in words and words[adapter] in str(error), f"{adapter}, {way}: {error}"
        return {}
    assert adapter not in words, f"{adapter}, {way}: no error, and the loss is {float(loss)}"
    right = truth("none" if way == "remove" else adapter, state)
    rounded = any(name in way for name in ("bfloat16", "accelerate"))
    assert abs(float(loss) / right - 1) < (2e-2 if rounded else 1e-5), (
        f"{adapter}, {way}: {float(loss)} for {right}"
    )
    loss.backward()
    return {}


def taken_off(adapter, way):
    """A copy, which nobody has a handle of, says how to take its head off. Then it has none, can be
    copied, and gets another one."""
    model = new_model()
    installed = ADAPTERS[adapter](model)
    copied = WAYS[way][0](model, installed)[0]
    try:
        fuse_head(copied)
    except ValueError as error:
        assert "del model.forward takes it off" in str(error), error
    else:
        raise AssertionError("two heads on one model")
    fresh, replicated = copy.deepcopy(copied), copy.deepcopy(copied)
    for m in (copied, fresh, replicated):
        del m.forward
    fuse_head(fresh).remove()
    assert not {*ENTRIES} & {*vars(fresh)} and not fresh.model._forward_pre_hooks
    replica = replicated._replicate_for_data_parallel()
    again = pickled(copied, None)[0], copy.deepcopy(copied), replica
    for m in (copied, *again[:2]):
        assert abs(float(m(input_ids=IDS, labels=IDS).loss) / truth("none", state_of(m)) - 1) < 1e-5
    assert all("__reduce_ex__" not in vars(m) for m in again)
    for m in (copied, *again[:2]):
        with fuse_head(m, head_loss()):
            loss = float(m(input_ids=IDS, labels=IDS).loss)
            assert abs(loss / truth("fuse_head", state_of(m)) - 1) < 1e-5
        assert not {*ENTRIES} & {*vars(m)} and not m.model._forward_pre_hooks
    return {}


def replaced_and_removed(adapter):
    """The error of a head that has something on top is short, and says what to do first."""
    model = new_model()
    installed = ADAPTERS[adapter](model)
    stock = model.forward
    model.forward = functools.partial(lambda model, **given: stock(**given), model)
    try:
        installed.remove()
    except RuntimeError as error:
        assert str(error).startswith("remove what was installed on top"), error
        assert "got functools.partial" in str(error) and "Embedding" not in str(error), error
    else:
        raise AssertionError("what is on top was removed")
    model.forward = stock
    installed.remove()
    return {}


# To compile a model takes longer than all other ways together: once, with FULL each adapter.
COMPILED = ADAPTERS if FULL else ["fuse_head"]
CASES = {
    f"{adapter}, {way}": lambda group, adapter=adapter, way=way: outcome(adapter, way)
    for adapter, way in itertools.product(ADAPTERS, WAYS)
    if way != "compile" or adapter in COMPILED
}
CASES |= {
    f"{adapter}, {way}, taken off": lambda group, adapter=adapter, way=way: taken_off(adapter, way)
    for adapter, way in itertools.product(FUSED, ("deepcopy", "torch.save"))
    if adapter in ADAPTERS
}
CASES |= {
    f"{adapter}, replaced and removed": lambda group, adapter=adapter: replaced_and_removed(adapter)
    for adapter in FUSED
    if adapter in ADAPTERS
}

if __name__ == "__main__":
    main(CASES)
