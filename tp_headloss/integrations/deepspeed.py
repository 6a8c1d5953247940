"""DeepSpeed AutoTP: the shard that its output layer holds, for the functions of
`integrations.transformers`.

AutoTP shards a transformers model in place, and users call nothing of this module: the engine's
model takes the loss.

    engine, *_ = deepspeed.initialize(model=model, config={"tensor_parallel": {"autotp_size": 2},
    ...}, ...) fused = fuse_head(engine.module, HeadLoss([CrossEntropy(), ZLoss(1e-4)]))
    engine.backward(engine(input_ids=ids, labels=labels).loss)

With ``"vocab_parallel_lm_head": true`` the model's logits are this rank's columns, and both
`causal_lm_loss` and `fuse_head` work (ZeRO stage 3: `causal_lm_loss` alone). With false it gathers
logits, for generate(): use `fuse_head`.

DeepSpeed divides the gradient by the number of data-parallel ranks and by its
gradient_accumulation_steps. So the mean over all N tokens of a step needs, in each call, the
denominator

    num_items_in_batch = N / (data-parallel ranks * gradient_accumulation_steps)

instead of N, or N / data-parallel ranks with ``engine.backward(loss, scale_wrt_gas=False)``.
Without num_items_in_batch each call is the mean over its own tokens, and the step the mean of these
means. Clipping comes after the division.
"""

from __future__ import annotations

from itertools import accumulate

from ..ranks.shard import VocabShard
from . import require

require("deepspeed")
from deepspeed.module_inject.layers import LinearLayer, VocabParallelLinear  # noqa: E402
from deepspeed.sequence.cross_entropy import VocabParallelCausalLMLoss  # noqa: E402

__all__ = ["VocabParallelCausalLMLoss", "is_sharded_on_vocabulary", "layer_shard"]


def is_sharded_on_vocabulary(layer) -> bool:
    """Return True if AutoTP shards a layer on the vocabulary: LinearLayer (gathers logits) or
    VocabParallelLinear."""
    return type(layer) in (LinearLayer, VocabParallelLinear)


def layer_shard(layer: LinearLayer, shard: VocabShard | None) -> VocabShard:
    """Return the shard of this rank's rows of the layer's weight. ValueError if `shard` is given
    and is another one."""
    boundaries = [0, *accumulate(layer._partition_sizes)]
    found = VocabShard.from_boundaries(boundaries, boundaries[-1], layer.mp_group)
    if shard is None:
        return found
    if (shard.start, shard.stop, shard.group) != (found.start, found.stop, found.group):
        raise ValueError(
            f"DeepSpeed's output layer holds ids [{found.start}, {found.stop}) in the group "
            f"{found.group_name!r}, but the shard says [{shard.start}, {shard.stop}) in "
            f"{shard.group_name!r}: leave the shard out"
        )
    return shard
