"""Compare the functions of integrations/, and those that docs/guides/rl_functions.md writes as one call, with
the sources of RL stacks, beside each other on gloo ranks.

    .venv/bin/python scripts/check/rl_hosts.py --nemo-rl DIR --skyrl DIR --slime DIR --areal DIR --megatron-rl DIR

DIR is a checkout of the stack, or its archive; a stack without one is left out. Only the stack's own files of these
functions are executed, as they are: its packages are entered without their `__init__`, and what those files import of
Megatron (and Megatron-RL's file, of anything but torch), of a platform, and of jaxtyping is a stub. Without CUDA,
`.cuda()` and pinned memory do nothing, and torch.compile is off.

Both get the same random logits or hidden states, 2 x 16 tokens of 96 ids over C context-parallel x P vocabulary ranks,
and the same random upstream gradients, which are equal on ranks that share the vocabulary. Printed is the largest
absolute difference of values and of gradients over all ranks; the exit status is 1 if one exceeds its tolerance and is
not a known difference. The tolerance is 1e-5 of the largest number (or of 1): logits reach 17, whose float32 spacing is
2e-6. A bfloat16 gradient, and a log-prob of Megatron-RL's in bfloat16, may differ by one rounding, 2^-8; beside a
bfloat16 GEMM of hidden states by 2^-6.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import NamedTuple
from unittest import mock

os.environ.update(TORCHDYNAMO_DISABLE="1", PYTHONWARNINGS="ignore")  # of the ranks' processes, too
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from pages import marked_block  # noqa: E402
from ranks import on_ranks  # noqa: E402

B, S, V, H, SCORED = 2, 16, 96, 16, 14  # SCORED: sequences are padded from it to S
LENGTHS, PADDED_LENGTHS = [7, 3, 12, 5], [8, 4, 12, 8]  # packed: B * S tokens in all
BOUNDS = torch.tensor([0, *torch.tensor(PADDED_LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
MEGATRON = ModuleType("megatron.core.parallel_state")  # as the hosts ask it for groups


class Host(NamedTuple):
    """Modules that have the functions, what else of the host these import, and what is a stub, with its members."""

    modules: list[str]
    packages: tuple[str, ...] = ()
    stubs: Mapping[str, dict] = MappingProxyType({})
    splits_sequences: bool = True  # over context-parallel ranks


def partitioned(bounds, total, ranks, rank):
    """Tokens of a rank, of packed sequences that are cut into 2 C chunks each: r and 2 C - 1 - r."""
    chunks = [part.chunk(2 * ranks) for part in torch.arange(total).split(bounds.diff().tolist())]
    return torch.cat([part[i] for part in chunks for i in (rank, 2 * ranks - 1 - rank)])


SKYRL = "skyrl.backends.skyrl_train"
SLIME = "slime.utils.ppo_utils", "slime.backends.megatron_utils.loss"
PLATFORMS = {"areal.infra": {}, "areal.infra.platforms": {"is_npu_available": False}}
HOSTS = {
    "nemo_rl": Host(["nemo_rl.distributed.model_utils"], ("nemo_rl.algorithms",)),
    "skyrl": Host(
        [f"{SKYRL}.distributed.megatron.model_utils", f"{SKYRL}.mtp.soft_ce"], (f"{SKYRL}.utils",),
        {"jaxtyping": {"Float": dict, "Integer": dict}, f"{SKYRL}.utils.io": {}},
    ),
    "slime": Host([*SLIME], (), {"slime.utils.http_utils": {"is_port_available": None}}, False),
    "areal": Host(["areal.utils.functional.vocab_parallel"], (), PLATFORMS, False),
    "megatron_rl": Host(
        ["megatron.rl.rl_utils"], (),
        {"yaml": {}, "transformer_engine_torch": {"thd_get_partitioned_indices": partitioned}},
    ),
}  # fmt: skip


def load(host: str, folder: str) -> SimpleNamespace:
    """The functions of a host's own files, whose packages are entered without their `__init__`."""
    modules, packages, stubs, _ = HOSTS[host]
    for name in (*modules, *(f"{package}.*" for package in packages)):
        parts = name.split(".")[:-1]
        for i in range(1, len(parts) + 1):
            entered = sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
            entered.__path__ = [str(Path(folder, *parts[:i]))]
    for name, members in stubs.items():
        stub(name, **members)
    if host == "megatron_rl":
        stub_imports(Path(folder, "megatron/rl/rl_utils.py"))
    else:
        stub("megatron")
    stub("megatron.core", mpu=MEGATRON, parallel_state=MEGATRON)
    sys.modules["megatron.core.parallel_state"] = MEGATRON
    found = {"ours": False}
    for name in modules:
        module = importlib.import_module(name)
        assert Path(folder) in Path(module.__file__).parents
        found.update(vars(module))
    return SimpleNamespace(**found)


def stub(name, **members):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(members)


def stub_imports(path):
    """Stub what Megatron-RL imports, and give what its `get_logprobs` needs of it a meaning."""
    absent = "megatron", "wandb", "torch.utils.tensorboard", "torch_memory_saver"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith(absent):
            module = sys.modules.setdefault(node.module, ModuleType(node.module))
            vars(module).update({x.name: MEGATRON_RL.get(x.name, mock.MagicMock()) for x in node.names})


MEGATRON_RL = {
    "get_args": lambda: SimpleNamespace(fp16=False, bf16=False),
    "get_attr_wrapped_model": getattr,
    "get_nvtx_range": lambda: lambda *_, **__: contextlib.nullcontext(),
    "is_batch_invariant_mode_enabled": lambda: False,
    "is_pp_last_stage": lambda group: True,
    "PackedSeqParams": SimpleNamespace,
    "set_model_config_attribute": lambda *_: None,
}


def without_cuda():
    """`.cuda()` and pinned memory do nothing."""
    if torch.cuda.is_available() or hasattr(torch.tensor, "plain"):
        return
    make = torch.tensor

    def tensor(*args, pin_memory=False, **keywords):
        return make(*args, **keywords)

    tensor.plain = make
    torch.tensor, torch.Tensor.cuda = tensor, lambda self, *args, **keywords: self


class Setting:
    """The groups of this rank and its part of the data."""

    def __init__(self, cp: int, tp: int, dtype):
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
        self.tp_group, self.cp_group = mesh["tp"].get_group(), mesh["cp"].get_group()
        MEGATRON.get_tensor_model_parallel_group = lambda: self.tp_group
        MEGATRON.get_tensor_model_parallel_rank = lambda: self.tp_group.rank()
        MEGATRON.get_context_parallel_world_size = lambda: cp
        self.cp, self.tp, self.cp_rank, self.dtype = cp, tp, self.cp_group.rank(), dtype
        self.start = self.tp_group.rank() * V // tp
        self.rank, self.bounds = self.tp_group.rank(), (self.start, self.start + V // tp, self.tp_group)
        generator = torch.Generator().manual_seed(5)
        self.all_logits = 4 * torch.randn(B, S, V, generator=generator)
        self.teacher = self.vocab(4 * torch.randn(B, S, V, generator=generator)).to(dtype)
        self.hidden = torch.randn(B, S, H, generator=generator).to(dtype)
        self.weight = self.vocab(torch.randn(V, H, generator=generator), 0).to(dtype)
        self.ids = torch.randint(0, V, (B, S), generator=generator)
        self.ids[:, 1::2] = self.all_logits[:, ::2].argmax(-1)  # every other one is the likeliest
        self.labels = self.ids.flatten().clone()
        self.labels[3] = -100
        self.mask = (torch.rand(B, S, generator=generator) > 0.3).float()
        entries = B, SCORED if cp > 1 else S, 5
        self.topk = torch.randn(entries, generator=generator), torch.randint(0, V, entries, generator=generator)
        self.kept = self.vocab(torch.rand(B, S, V, generator=generator) > 0.5).flatten(0, 1)
        self.logits = self.tokens(self.vocab(self.all_logits)).to(dtype)  # of sequences
        self.packed = self.pack(self.vocab(self.all_logits)).to(dtype)
        self.packed_hidden = self.pack(self.hidden)
        attended = [F.pad(torch.ones(n), (i % 3, S - n - i % 3)) for i, n in enumerate(LENGTHS)]
        self.attention_mask = torch.stack(attended).bool()

    def vocab(self, x, dim=-1):
        return x.narrow(dim, self.start, V // self.tp).contiguous()

    def tokens(self, x):
        """This context-parallel rank's positions of sequences [B, S, ..]: of 2 C chunks r and 2 C - 1 - r."""
        if self.cp == 1:
            return x
        chunks = x.chunk(2 * self.cp, 1)
        return torch.cat([chunks[self.cp_rank], chunks[2 * self.cp - 1 - self.cp_rank]], 1)

    def pack(self, x):
        """This context-parallel rank's tokens [1, T/C, ..] of x [B, S, ..] as packed sequences."""
        return torch.cat([self.tokens(part) for part in x.flatten(0, 1).unsqueeze(0).split(PADDED_LENGTHS, 1)], 1)


class Case(NamedTuple):
    """A function of both modules, called with leaves, args and options, of whose outputs after(outputs) is compared."""

    name: str
    form: str
    leaves: list
    args: tuple
    options: Mapping = MappingProxyType({})
    after: Callable = list
    known: str = ""  # difference that is expected
    host_dtype: torch.dtype | None = None  # of the host's leaves; None: the same as ours


def nemo_rl(s):
    ids, cp = s.ids[:, :SCORED], {"cp_group": s.cp_group}
    packed = s.ids.view(1, -1), BOUNDS, S, *s.bounds
    name = "from_parallel_logits_to_logprobs"
    sampled = {"sampling_params": SimpleNamespace(top_k=20, top_p=0.8, temperature=1.0)}
    for more in ({}, {"chunk_size": 3}, sampled):
        yield Case(name, ", ".join(more), [s.logits], (ids, *s.bounds), {**cp, **more})
        yield Case(f"{name}_packed_sequences", ", ".join(more), [s.packed], packed, {**cp, **more})
    ignored = ids.clone()
    ignored[0, 3] = -100
    yield Case(name, "an id of -100", [s.logits], (ignored, *s.bounds), cp, known="the host's gradient is not 0")
    rolled = torch.cat([part.roll(-1) for part in s.ids.flatten().split(PADDED_LENGTHS)]).view(B, S)
    packed = s.pack(rolled), BOUNDS, 10, *s.bounds
    more = {"target_is_pre_rolled": True}
    yield Case(f"{name}_packed_sequences", ", ".join(more), [s.packed], packed, {**cp, **more})
    more = {"vocab_parallel_rank": s.rank, "vocab_parallel_group": s.tp_group, "context_parallel_group": s.cp_group}
    yield Case("get_next_token_logprobs_from_logits", "", [s.logits], (ids,), more)
    for zero, entropy in ((True, True), (False, False), (False, True)):
        args = *s.topk, zero, entropy, s.rank, s.tp_group, s.cp_group
        form = f"zero_outside_topk={zero}, calculate_entropy={entropy}"
        known = "" if zero or not entropy else "raises"
        yield Case("get_distillation_topk_logprobs_from_logits", form, [s.logits], args, known=known)
    if s.cp == 1:
        own = s.hidden.transpose(0, 1).chunk(s.tp)[s.rank].contiguous()
        args = None, s.ids, *s.bounds, False, None, 5
        yield Case("from_parallel_hidden_states_to_logprobs", "", [own, s.weight], args)


def skyrl(s):
    cp, of_head = {"cp_group": s.cp_group}, {"temperature": 0.5}
    logits, hidden = "from_parallel_logits_to_logprobs", "from_parallel_hidden_to_logprobs"
    forms = {"attention_mask": s.attention_mask}, {"sub_seq_lengths": [LENGTHS[:2], LENGTHS[2:]]}
    for more in ({}, *forms, {"chunk_size": 5}):
        args = s.ids.view(1, -1), BOUNDS, S if "attention_mask" in more else 21, *s.bounds
        yield Case(f"{logits}_packed_sequences", ", ".join(more), [s.packed], args, {**cp, **more})
        leaves = [s.packed_hidden, s.weight]
        yield Case(f"{hidden}_packed_sequences", ", ".join(more), leaves, args, {**cp, **of_head, **more})
    for rows, form in zip((4, 2), forms):
        weights = torch.linspace(0, 2, rows * 9).view(rows, 9)
        args = BOUNDS, S, 9, s.attention_mask[:rows], weights, s.cp_group
        more = {"sub_seq_lengths": form.get("sub_seq_lengths"), "tp_group": s.tp_group}
        name = "vocab_parallel_entropy_packed_sequences"
        for how in precisions(s):
            yield Case(name, ", ".join(form), [s.packed], args, more, **how)
        name, args = "from_parallel_hidden_to_entropy_packed_sequences", (*args, s.tp_group, more["sub_seq_lengths"])
        yield Case(name, ", ".join(form), [], (s.packed_hidden, s.weight, *args))
    ignored = s.ids[:, :SCORED].clone()
    ignored[0, 3] = -100
    yield Case(logits, "an id of -100", [s.logits], (ignored, *s.bounds), cp, known="the host's gradient is not 0")
    for more in ({}, {"chunk_size": 3}):
        args = s.ids[:, :SCORED], *s.bounds
        yield Case(logits, ", ".join(more), [s.logits], args, {**cp, **more})
        yield Case(hidden, ", ".join(more), [s.tokens(s.hidden), s.weight], args, {**cp, **of_head, **more})
    if s.cp == 1:
        for more, factor in (({}, None), ({"chunk_size": 5}, torch.tensor(7.0))):
            for how in precisions(s):
                options = {**more, "tp_group": s.tp_group}
                yield Case("vocab_parallel_entropy", ", ".join(more), [s.logits], (), options, **how)
            args = s.teacher, s.mask, factor, s.tp_group
            yield Case("draft_soft_ce", ", ".join(more), [s.logits], args, more)
        width = V // s.tp - 5 * s.rank
        args = s.teacher[..., :width], *args[1:]
        yield Case("draft_soft_ce", "padding cut off", [s.logits[..., :width]], args)
    # SkyRL's is of other ids on more ranks, and among equal logits, which bfloat16 has
    for roll in (0, 1) if s.tp == 1 and s.dtype == torch.float32 else ():
        args = s.tokens(s.teacher), s.tokens(s.mask), 7
        yield Case("draft_soft_ce_topk", f"roll_shift {roll}", [s.logits], args, {"roll_shift": roll})


def precisions(s) -> list[dict]:
    """SkyRL's entropy is computed in the type of the logits: given bfloat16, it is compared given fp32, too."""
    known = {"known": "the host computes in bfloat16"}
    return [{}] if s.dtype == torch.float32 else [known, {"host_dtype": torch.float32}]


def slime(s):
    for more in ({}, {"chunk_size": 5}, {"log_prob_keep_mask": s.kept}, {"with_entropy_grad": False}):
        args = s.labels, s.tp_group, True
        after = functools.partial(scored, s.labels)
        yield Case("calculate_log_probs_and_entropy", ", ".join(more), [s.logits.flatten(0, 1)], args, more, after)
    if s.dtype == torch.float32:  # which this function asserts
        lengths, responses = LENGTHS, [3, 1, 7, 2]
        tokens = list(s.ids.flatten()[: sum(lengths)].split(lengths))
        options = {"unconcat_tokens": tokens, "total_lengths": lengths, "response_lengths": responses}
        settings = {"rollout_temperature": 0.7, "log_probs_chunk_size": -1, "entropy_coef": 0.1, "allgather_cp": False}
        options.update(args=SimpleNamespace(**settings), with_entropy=True)
        name, leaves = "get_log_probs_and_entropy", [s.logits.flatten(0, 1).unsqueeze(0)]
        yield Case(name, "", leaves, (), options, per_sample)
        # each response token was drawn from itself and three neighbours
        near = torch.arange(4) - 2
        kept = [[(token + near) % V for token in x[-n:].tolist()] for x, n in zip(tokens, responses)]
        sets = {"top_p_token_ids": [torch.cat(rows).tolist() for rows in kept]}
        sets["top_p_token_offsets"] = [list(range(0, 4 * n + 1, 4)) for n in responses]
        yield Case(name, "top_p_token_ids", leaves, (), {**options, **sets}, per_sample)


def per_sample(outputs):
    return [torch.cat(values) for values in outputs[1].values()]


def in_slime(function, module, *args, **options):
    """slime's function, which calls ours."""
    with mock.patch.dict(function.__globals__, calculate_log_probs_and_entropy=module.calculate_log_probs_and_entropy):
        return function(*args, **options)


def areal(s):
    for name, temperature, size in itertools.product(
        ("gather_logprobs", "gather_logprobs_entropy"), (1.0, 0.7), (1024, 5)
    ):
        args, form = (s.labels, temperature, s.tp_group, size), f"temperature={temperature}, chunk_size={size}"
        yield Case(name, form, [s.logits.flatten(0, 1)], args, after=functools.partial(scored, s.labels))
    args, known = (s.labels, 1.0, s.tp_group), "the host scores the label"
    yield Case("gather_logprobs", "a label of -100", [s.logits.flatten(0, 1)], args, known=known)


def megatron_rl(s):
    bins = SimpleNamespace(cu_seqlens_q=BOUNDS, cu_seqlens_q_padded=None, cp_scatter_cache=None)
    bins.cu_seqlens_kv, bins.cu_seqlens_kv_padded = bins.cu_seqlens_q, None
    more = {"tp_group": s.tp_group}
    if s.cp == 1:
        yield Case("selective_log_softmax", "", [s.logits], (s.ids,), more)
        yield Case("get_logprobs", "", [s.logits], (s.ids, None, s.cp_group), more)
    yield Case("get_logprobs", "packed", [s.packed], (s.ids.view(1, -1), bins, s.cp_group), more)


class GatheredLogits(torch.autograd.Function):
    """Logits of all ranks as Megatron's output layer gathers them; backward takes this rank's columns."""

    @staticmethod
    def forward(ctx, logits):
        ctx.group = MEGATRON.get_tensor_model_parallel_group()
        parts = [torch.empty_like(logits) for _ in range(ctx.group.size())]
        torch.distributed.all_gather(parts, logits, group=ctx.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()]


def in_megatron_rl(function, module, logits, tokens, bins, cp_group, tp_group=None):
    """Megatron-RL's get_logprobs of a model of these logits, which calls ours with sharded ones."""

    def model(*_, **__):
        return logits if module.ours else GatheredLogits.apply(logits)

    model.config, model.pg_collection = SimpleNamespace(flash_decode=False), SimpleNamespace(cp=cp_group, pp=None)
    ours = functools.partial(module.selective_log_softmax, tp_group=tp_group)
    with mock.patch.dict(function.__globals__, {"selective_log_softmax": ours} if module.ours else {}):
        return function(model, tokens, tokens, packed_seq_params=bins)


def scored(labels, outputs):
    """0 in the place of what a host gives to an ignored label."""
    return [x.reshape(labels.shape).where(labels >= 0, 0.0) for x in outputs]


def evaluated(case: Case, module, s):
    """Values, and gradients of upstream ones that differ between context-parallel ranks."""
    dtype = None if module.ours else case.host_dtype
    leaves = [leaf.detach().clone().to(dtype or leaf.dtype).requires_grad_() for leaf in case.leaves]
    # the host looks this group up
    options = {name: x for name, x in case.options.items() if module.ours or name != "tp_group"}
    outputs = getattr(module, case.name)(*leaves, *case.args, **options)
    outputs = case.after([outputs] if isinstance(outputs, torch.Tensor) else list(outputs))
    # 0 in the place of labels that top-k and top-p do not keep
    outputs = [x.masked_fill(x == -torch.inf, 0.0) for x in outputs if x is not None]
    generator = torch.Generator().manual_seed(s.cp_rank)
    upstream = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    pairs = [(x, g) for x, g in zip(outputs, upstream) if x.requires_grad]
    if pairs:
        torch.autograd.backward(*map(list, zip(*pairs)))
    return [x.detach() for x in outputs], [leaf.grad for leaf in leaves if leaf.grad is not None]


def compared(group, device, host, folder, cp, tp, dtype):
    """Differences of one host, by function and form: of values and of gradients, each with the largest number."""
    without_cuda()
    theirs, rows = load(host, folder), []
    s = Setting(cp, tp, dtype)
    module = SimpleNamespace(**functions_of(host, s), ours=True)
    if host == "nemo_rl":
        for each in (theirs, module):
            each.get_next_token_logprobs_from_logits = functools.partial(
                lambda function, logits, ids, **more: function(ids, logits, **more),
                each.get_next_token_logprobs_from_logits,
            )
    if host == "slime":
        module.get_log_probs_and_entropy = functools.partial(in_slime, theirs.get_log_probs_and_entropy, module)
    if host == "megatron_rl":
        # the gradient of torch's all-gather, which on gloo scatters from a rank of the group as if it were one of all
        scatter = torch.distributed.distributed_c10d.scatter
        torch.distributed.scatter = lambda x, parts, rank, group: scatter(x, parts, group=group, group_src=rank)
        function, select = theirs.get_logprobs, theirs.selective_log_softmax
        theirs.selective_log_softmax = lambda logits, index: select(GatheredLogits.apply(logits), index)
        for each in (theirs, module):
            each.get_logprobs = functools.partial(in_megatron_rl, function, each)
    for case in globals()[host](s):
        own, form = evaluated(case, module, s), case.form + "; host: float32 copy" * (case.host_dtype is not None)
        try:
            other = evaluated(case, theirs, s)
        except (RuntimeError, IndexError, TypeError) as error:
            rows.append((case.name, form, case.known, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
            continue
        rows.append((case.name, form, case.known, [difference(a, b) for a, b in zip(own, other)]))
    return rows


def functions_of(host, s) -> dict:
    """Our functions by name; those of the guide with the host's arguments, of which they need logits, labels, and the
    temperature."""
    from tp_headloss import VocabShard

    scope = {"shard": VocabShard.from_group(s.tp_group, V)}
    exec(compile(marked_block("run", "one-call"), "rl_functions.md", "exec"), scope)
    found = {
        "gather_logprobs": lambda x, labels, temperature, *_: scope["gather_logprobs"](x, labels, temperature),
        "gather_logprobs_entropy": lambda x, y, temperature, *_: scope["gather_logprobs_entropy"](x, y, temperature),
        "selective_log_softmax": lambda x, index, tp_group=None: scope["selective_log_softmax"](x, index),
        "vocab_parallel_entropy": lambda x, **_: scope["vocab_parallel_entropy"](x),
    }
    if host in ("areal", "megatron_rl"):
        return found
    return found | vars(importlib.import_module(f"tp_headloss.integrations.{host}"))


def difference(own, other):
    assert len(own) == len(other) and [x.shape for x in own] == [x.shape for x in other]
    if not own:
        return 0.0, 1.0
    gap = max((a.double() - b.double()).abs().max().item() for a, b in zip(own, other))
    return gap, max(b.abs().max().item() for b in other)


def tolerance(dtype, name, of_gradient):
    rounded = of_gradient or "hidden" in name or name in ("selective_log_softmax", "get_logprobs")
    if dtype == torch.bfloat16 and rounded:
        return 2.0**-6 if "hidden" in name else 2.0**-8
    return 1e-5


def reported(host, cp, tp, dtype, results) -> list:
    """Print the rows of all ranks, and return for each that had to agree (beyond tolerance, differences relative to the
    largest number or 1)."""
    kept = []
    for rows in zip(*results):
        name, form, known, found = rows[0]
        kind = f"| {host} | {name} | {form} | {cp} x {tp} | {str(dtype)[6:]} |"
        if isinstance(found, str):
            print(kind, f"host raises {found} | |")
            kept.append((not known, 0.0, 0.0))
            continue
        gaps = [max(row[3][i][0] for row in rows) for i in range(2)]
        most = [max(1.0, *(row[3][i][1] for row in rows)) for i in range(2)]
        over = [not gaps[i] <= tolerance(dtype, name, i) * most[i] for i in range(2)]
        text = f" ({known})" if known else " WRONG"
        print(kind, *(f"{gap:.1e}{text * no} |" for gap, no in zip(gaps, over)), flush=True)
        if not known:
            kept.append((any(over), *(gap / number for gap, number in zip(gaps, most))))
    return kept


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for host in HOSTS:
        parser.add_argument(f"--{host.replace('_', '-')}", dest=host, metavar="DIR", type=Path)
    folders = {host: folder for host, folder in vars(parser.parse_args()).items() if folder is not None}
    bad, summary = 0, []
    print("| host | function | form | C x P | dtype | values | gradients |\n|---|---|---|---|---|---|---|")
    for (host, folder), dtype in itertools.product(folders.items(), (torch.float32, torch.bfloat16)):
        rows = []
        for cp, tp in ((1, 2), (2, 1), (2, 2)) if HOSTS[host].splits_sequences else ((1, 2),):
            results = on_ranks(cp * tp, compared, host, str(folder.resolve()), cp, tp, dtype)
            rows += reported(host, cp, tp, dtype, results)
        wrong, values, gradients = zip(*rows)
        bad += sum(wrong)
        text = f"{len(rows)} comparisons, relative: values {max(values):.1e}, gradients {max(gradients):.1e}"
        summary.append(f"{host}, {str(dtype)[6:]}: {text}")
    print(*summary, f"{bad} comparisons beyond their tolerance", sep="\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
