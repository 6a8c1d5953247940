"""Megatron-Core's own schedules with our head against its own loss, on four ranks: pipeline stages,
model chunks, context parallelism, recomputation, and data parallelism with the distributed
optimizer."""

import functools
from unittest import mock

import torch
from cases import compared, refused, relative_errors
from megatron_cases import HAS_HYBRID, B, S, V, config_of

# isort: split
# what is above makes Megatron run on CPUs, before it is imported
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_model import Attention, Norm
from tp_headloss import CrossEntropy, Linear
from tp_headloss.integrations.megatron import MegatronHead, install

MICROBATCHES = 4


@functools.lru_cache(maxsize=1)  # the same as that of the case before
def layout(tp=1, pp=1, vp=None, cp=1):
    """Makes these groups Megatron's; the ranks that are left are data-parallel."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, vp, context_parallel_size=cp)


def config_for(vp, recompute, mtp=False, **kwargs):
    """Outputs that were sent are freed, but with virtual stages, where gloo may still be sending
    them."""
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
    }
    more = (
        {
            "virtual_pipeline_model_parallel_size": vp,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
        if vp
        else {}
    )
    if recompute:
        more |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return config_of(
        mtp=mtp, num_layers=sizes["pipeline_model_parallel_size"] * (vp or 1), batch_p2p_sync=False,
        deallocate_pipeline_outputs=vp is None, **sizes, **more, **kwargs,
    )  # fmt: skip


def layer_spec():
    spec = get_gpt_layer_local_spec()
    # Megatron's own refuses context parallelism
    spec.submodules.self_attention.submodules.core_attention = Attention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    return spec


def gpt_chunk(config, tied, **stage):
    spec = TransformerBlockSubmodules(layer_specs=[layer_spec()], layer_norm=Norm)
    if config.mtp_num_layers and stage["post_process"]:
        stage["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    return GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=V, max_sequence_length=2 * S,
        share_embeddings_and_output_weights=tied, **stage,
    )  # fmt: skip


def hybrid_chunk(config, tied, vp_stage, **stage):
    from megatron.core.models.hybrid import hybrid_block, hybrid_model

    hybrid_block.TENorm = Norm
    layers = hybrid_block.HybridStackSubmodules(attention_layer=layer_spec())
    return hybrid_model.HybridModel(
        config=config, vocab_size=V, max_sequence_length=S, hybrid_layer_pattern="*|*",
        hybrid_stack_spec=ModuleSpec(module=hybrid_block.HybridStack, submodules=layers),
        position_embedding_type="learned_absolute", share_embeddings_and_output_weights=tied, **stage,
    )  # fmt: skip


def chunks_of(make=gpt_chunk, vp=None, tied=False, recompute=False, ddp=None, **kwargs):
    """This rank's model chunks, each in Megatron's DDP, and their config with what its training
    loop puts there."""
    config = config_for(vp, recompute, **kwargs)
    torch.manual_seed(7)
    chunks = []
    for number in range(vp or 1):
        place = {"ignore_virtual": False, "vp_stage": number if vp else None}
        chunk = make(
            config, tied, pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place), vp_stage=place["vp_stage"],
        )  # fmt: skip
        chunk = Float16Module(config, chunk) if config.bf16 else chunk
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **(ddp or {}))
        chunks.append(
            DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        )
    config.finalize_model_grads_func = finalize_model_grads
    if settings.overlap_grad_reduce:
        config.no_sync_func, config.grad_sync_func = chunks[0].no_sync, chunks[0].start_grad_sync
    return chunks


def microbatches():
    """This rank's part: of the samples by its data-parallel rank, of a sequence by its
    context-parallel rank."""
    cp, cp_rank = (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    parts = [cp_rank, 2 * cp - 1 - cp_rank] if cp > 1 else [0]
    for _ in range(MICROBATCHES):
        ids, labels = (torch.randint(0, V, (B, S * cp), generator=generator) for _ in range(2))
        whole = (
            ids,
            torch.arange(S * cp).expand(B, -1),
            labels,
            torch.rand(B, S * cp, generator=generator),
        )
        yield [torch.cat([x.chunk(2 * cp if cp > 1 else 1, 1)[i] for i in parts], 1) for x in whole]


def plainly(model, ids, positions, **kwargs):
    return model(ids, positions, None, **kwargs)


def recomputed(model, ids, positions, **kwargs):
    """All but the embedding, and with it the head, in one of Megatron's recomputed regions."""
    embedded = model.module.embedding(ids, positions)
    whole = functools.partial(model, ids, positions, None, **kwargs)
    return tensor_parallel.checkpoint(lambda x: whole(decoder_input=x), False, embedded)


def step(chunks, call=plainly):
    """One call of Megatron's schedule -> losses [n, b, s] of the last stage's microbatches (others:
    nothing), and ``main_grad`` of all parameters by name."""
    seen = []

    def forward_step(numbers, model):
        ids, positions, labels, mask = next(numbers)
        return call(model, ids, positions, labels=labels, loss_mask=mask), functools.partial(
            reduced, mask
        )

    def reduced(mask, losses):
        assert losses.shape == (B, S) and losses.dtype == torch.float32
        seen.append(losses.detach())
        mean = (losses * mask).sum() / mask.sum()
        return mean, {"loss": mean.detach()}

    for chunk in chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[microbatches() for _ in chunks], model=chunks,
        num_microbatches=MICROBATCHES, seq_length=S * parallel_state.get_context_parallel_world_size(),
        micro_batch_size=B, forward_only=False,
    )  # fmt: skip
    grads = {n: p.main_grad.float().clone() for n, p in parameters_of(chunks).items()}
    return torch.stack(seen) if seen else torch.zeros(0), grads


def parameters_of(chunks):
    return {f"{i}.{n}": p for i, chunk in enumerate(chunks) for n, p in chunk.named_parameters()}


def installed(chunks, fused=True, fusion=False, **kwargs) -> MegatronHead | None:
    """The head of the last stage's last chunk, None elsewhere. fusion: the layer's
    gradient_accumulation_fusion, which Megatron allows where it has kernels for it."""
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    head = MegatronHead(ignore_index=-100, **kwargs)
    handle = install(chunks[-1], head, fused=fused)
    handle.model.output_layer.gradient_accumulation_fusion = fusion
    return head


def check_main_grad(chunks, last):
    if last is not None:
        assert chunks[-1].module.output_layer.weight.grad_added_to_main_grad


def head_weight(parameters) -> str:
    """The name of the output layer's weight, or of the first one of a stage that has none."""
    return next((name for name in parameters if "output_layer" in name), next(iter(parameters)))


def scheduled(tp=1, pp=1, vp=None, cp=1, call=plainly, head=None, **kwargs):
    """One step; head: arguments of `installed`."""

    def case(group):
        layout(tp, pp, vp, cp)
        stock, chunks = chunks_of(vp=vp, **kwargs), chunks_of(vp=vp, **kwargs)
        theirs = step(stock)
        last = installed(chunks, **(head or {}))
        assert last is None or last.calls == 0
        ours = step(chunks, call)
        if head and head.get("fusion"):
            check_main_grad(chunks, last)
        calls = MICROBATCHES * (3 if kwargs.get("mtp") else 1) * (2 if call is recomputed else 1)
        assert last is None or last.calls == calls, (last.calls, calls)
        return compared(*ours, *theirs, head_weight(theirs[1]))

    return case


def optimized(group):
    """Two steps of the distributed optimizer, which has half of the gradients and of Adam's state
    on each replica; dW is added to the ``main_grad`` that it reduces while the backward runs."""
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, clip_grad=0.0, use_distributed_optimizer=True
    )
    layout(tp=2)
    ddp = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    stock, chunks = chunks_of(ddp=ddp), chunks_of(ddp=ddp)
    before, found = {n: p.detach().clone() for n, p in parameters_of(stock).items()}, []
    last = installed(chunks, fusion=True)
    for trained in (stock, chunks):
        optimizer = get_megatron_optimizer(settings, trained)
        for _ in range(2):
            seen = step(trained)
            optimizer.step()
        found.append(
            (*seen, {n: p.detach() - before[n] for n, p in parameters_of(trained).items()})
        )
    check_main_grad(chunks, last)
    theirs, ours = found
    updates = max(relative_errors(ours[2], theirs[2]).values())
    return compared(*ours[:2], *theirs[:2], head_weight(theirs[1])) | {"updates": updates}


def stages(group):
    """What a list of chunks and a chunk without an output layer are told; the last chunk is
    taken."""
    head = MegatronHead(ignore_index=-100)
    layout(tp=2, pp=2, vp=2)
    chunks = chunks_of(vp=2)
    refused(
        lambda: install(chunks, head),
        "got a list of 2: pass the chunk that has the output layer",
        TypeError,
    )
    for fused in (True, False):
        words = "install on the last pipeline stage alone, in its last chunk"
        refused(lambda fused=fused: install(chunks[0], head, fused=fused), words)
    with mock.patch.object(tensor_parallel.layers, "_grad_accum_fusion_available", True):
        deferring = chunks_of(
            vp=2, gradient_accumulation_fusion=True, defer_embedding_wgrad_compute=True
        )[-1]
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        install(chunks[-1], head)
        refused(lambda: install(deferring, head), "defer_embedding_wgrad_compute=True")
    else:
        refused(lambda: install(chunks[-1], head), "no output layer")
    return {}


SWEEP = {"terms": [CrossEntropy()], "linear": Linear(mode="one_sweep")}
CASES = {  # equal layouts one after another, as groups take time
    "pp": scheduled(pp=2), "pp, mtp": scheduled(pp=2, mtp=True), "pp, tp": scheduled(pp=2, tp=2),
    "pp, tp, sp, tied": scheduled(pp=2, tp=2, sp=True, tied=True), "pp, bf16": scheduled(pp=2, tp=2, bf16=True),
    "pp, loss hook": scheduled(pp=2, tp=2, head={"fused": False}),
    "pp, one sweep": scheduled(pp=2, tp=2, head={"fusion": True, **SWEEP}),
    "recompute": scheduled(pp=2, tp=2, recompute=True), "chunks": scheduled(pp=2, tp=2, vp=2), "stages": stages,
    "cp, tp": scheduled(cp=2, tp=2), "cp, tp, sp": scheduled(cp=2, tp=2, sp=True),
    "cp, loss hook": scheduled(cp=2, tp=2, head={"fused": False}), "cp, pp, mtp": scheduled(cp=2, pp=2, mtp=True),
    "recomputed head": scheduled(tp=2, recompute=True, call=recomputed, head={"fusion": True}),
    "recomputed head, one sweep": scheduled(tp=2, sp=True, call=recomputed, head=SWEEP),
    "distributed optimizer": optimized,
}  # fmt: skip
if HAS_HYBRID:
    CASES |= {"pp, hybrid": scheduled(make=hybrid_chunk, pp=2, tp=2)}
