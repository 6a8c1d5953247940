"""Readers of sampling masks, the sets of ids that a sampler kept, in the formats of engines and
trainers, as `IdSets`.

Each host's format has a function. vLLM, prime-rl and NeMo-RL call it a sampling mask, SkyRL a
sample support. Nothing of a host is imported. The formats are by signature: those of vLLM 0.28 and
later, of prime-rl's transport and of verifiers 0.4, of NeMo-RL's SamplingMask and of SkyRL's sample
support in September 2026. verl 0.9.1 has vLLM's.

A set belongs to the token that was drawn from it, and a label is the *next* token. So the sets of
tokens [B, S] are those of the labels ``tokens[:, 1:]`` as ``sets[:, 1:]``. Sets of sampled tokens
alone become those of all labels by `IdSets.scatter`. Prompts, tool outputs and padding have none;
their labels have to be ignored, or are NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import torch

from ..arguments.id_sets import IdSets
from ..spec import IDS, TENSOR


def from_vllm(masks: Iterable) -> IdSets:
    """Return the sets [N] of the tokens of some completions, one after the other.

    Args:
        masks: for each completion its ``sampling_mask``: vLLM's SamplingMask, whose ``token_ids``
            are a list of ids per token, or one list beside ``offsets``, as slime's two lists are;
            or the list of lists that /inference/v1/generate answers, and SGLang as
            ``meta_info["output_token_sampling_mask"]``.

    Raises:
        TypeError: a completion without a mask (None): the engine ran without
            ``return_sampling_mask=True``.

    Examples:
        >>> sets = from_vllm([[[3, 42], [7]], [[1]]])  # completions of 2 tokens and of one
        >>> sets.ids, sets.spans
        (tensor([ 3, 42,  7,  1]), tensor([[0, 2],
                [2, 3],
                [3, 4]]))
        >>> sampled = torch.tensor(
        ...     [[False, True, True], [True, False, False]]
        ... )  # labels that are of completions
        >>> sets.scatter(sampled).contains(torch.tensor([[5, 42, 7], [1, 0, 0]]))
        tensor([[False,  True,  True],
                [ True, False, False]])
    """
    return IdSets.cat([_completion_sets(mask) for mask in _each(masks, "completion")])


def _each(masks, of: str) -> list:
    """Return the masks as a list; TypeError unless they are some, one for each completion, say."""
    if not isinstance(masks, Iterable):
        raise TypeError(
            f"sampling masks must be a list with one for each {of}, got {type(masks).__name__}"
            + ("" if masks is None else ": of one, write [mask]")
        )
    found = list(masks)
    for mask in found:
        _refuse_log_probs(mask)
    return found


def _refuse_log_probs(mask):
    """Raise TypeError for a completion's logprobs, which have a dict for each token.

    Its ids are the likeliest ones, not those that the sampler kept.
    """
    rows = [mask, *mask] if isinstance(mask, (list, tuple)) else [mask]
    if hasattr(mask, "logprobs") or any(isinstance(row, Mapping) for row in rows):
        got = "dicts" if isinstance(mask, (list, tuple)) else type(mask).__name__
        raise TypeError(
            f"a sampling mask must have the ids that the sampler kept, got {got}, as logprobs are: "
            "pass the sampling mask, of vLLM the completion's .sampling_mask"
        )


def _sample_sets(mask) -> IdSets:
    if not (hasattr(mask, "ids") and hasattr(mask, "counts")):
        raise TypeError(
            "a sample's sampling_mask must be an object with ids and counts, got "
            f"{type(mask).__name__}"
        )
    return _sets_from_counts(mask.ids, mask.counts)


def _completion_sets(mask) -> IdSets:
    ids, offsets = getattr(mask, "token_ids", mask), getattr(mask, "offsets", None)
    if offsets is None:
        if not isinstance(ids, Iterable) or not all(isinstance(row, Iterable) for row in ids):
            got = f"one of {next(iter(ids))!r}, .." if isinstance(ids, Iterable) else repr(ids)
            raise TypeError(
                "a sampling mask must be vLLM's SamplingMask or a list of ids per token, got "
                f"{got}{_hint_of_row(ids)}"
            )
        return _sets_from_counts(list(chain.from_iterable(ids)), [len(row) for row in ids])
    return IdSets.from_csr(_int_tensor(ids), _int_tensor(offsets))


def _hint_of_row(ids) -> str:
    """Return what to write for what stands in the place of a list of ids per token."""
    if ids is None:
        return ": ask the engine for it, return_sampling_mask=True"
    if isinstance(ids, Iterable) and any(row is None for row in ids):
        return ": a token without a set has every id, range(vocab_size), or is left out by scatter"
    return ": of one completion write [lists]"


def from_prime_rl(masks: Iterable) -> IdSets:
    """Return the sets [N] of the tokens of some samples, prompts included, one after the other.

    Where prime-rl has no ids for a token it takes the log-prob over the whole vocabulary; here such
    a token's label has to be ignored. In its trainer the mask is a tensor [B, S, K] of ids, -1
    where there is none, which `IdSets` takes.

    Args:
        masks: for each sample its ``sampling_mask``: an object with ``ids``, the sets one after the
            other, and ``counts``, ids per token, each int32 as bytes (prime_rl.transport) or as
            arrays (verifiers).

    Examples:
        >>> from types import SimpleNamespace
        >>> sets = from_prime_rl(
        ...     [SimpleNamespace(ids=torch.tensor([3, 42, 7]), counts=torch.tensor([0, 2, 1]))]
        ... )
        >>> sets.spans  # the first token is a prompt's
        tensor([[0, 0],
                [0, 2],
                [2, 3]])
    """
    return IdSets.cat([_sample_sets(mask) for mask in _each(masks, "sample")])


def from_nemo_rl(mask) -> IdSets:
    """Return the sets [B, S] of a batch of tokens: without ids where sizes are 0.

    `nemo_rl.get_next_token_logprobs_from_logits` takes NeMo-RL's mask itself.

    Args:
        mask: NeMo-RL's SamplingMask, with ``token_ids`` [B, S, K] and ``sizes`` [B, S], the number
            of ids that count; or a mapping with "sampling_mask_token_ids" and
            "sampling_mask_sizes", as its batches are.

    Examples:
        >>> ids, sizes = torch.tensor([[[0, 0], [5, 0], [4, 9]]]), torch.tensor([[0, 1, 2]])
        >>> from_nemo_rl({"sampling_mask_token_ids": ids, "sampling_mask_sizes": sizes}).mask
        tensor([[[False, False],
                 [ True, False],
                 [ True,  True]]])
    """
    if isinstance(mask, Mapping):
        ids, sizes = (mask[f"sampling_mask_{name}"] for name in ("token_ids", "sizes"))
    elif hasattr(mask, "token_ids") and hasattr(mask, "sizes"):
        ids, sizes = mask.token_ids, mask.sizes
    else:
        raise TypeError(
            "sampling_mask must be NeMo-RL's SamplingMask, with token_ids and sizes, or a mapping, got "
            f"{type(mask).__name__}"
        )
    TENSOR.check("token_ids of a sampling mask", ids, {})
    IDS.check("sizes of a sampling mask", sizes := _int_tensor(sizes), {})
    if sizes.shape != ids.shape[:-1]:
        raise ValueError(
            f"a sampling mask must have sizes {list(ids.shape[:-1])}, got {list(sizes.shape)}"
        )
    if not sizes.is_cuda and bool(((sizes < 0) | (sizes > ids.shape[-1])).any()):
        some = sizes.flatten()[:20].tolist()
        raise ValueError(f"a sampling mask must have sizes in [0, {ids.shape[-1]}], got {some}")
    return IdSets(ids, torch.arange(ids.shape[-1], device=ids.device) < sizes.unsqueeze(-1))


def from_skyrl(supports: Iterable) -> IdSets:
    """Return the sets [N] of the response tokens of some trajectories, one after the other.

    Args:
        supports: for each trajectory its ``rollout_sample_support``, an integer array or tensor
            [tokens, top_k] with -1 where there is no id. The ``values`` of SkyRL's PackedTensor are
            those of all its trajectories.

    Examples:
        >>> from_skyrl([torch.tensor([[7, 8], [4, -1]]), torch.tensor([[5, 6]])]).ids
        tensor([[ 7,  8],
                [ 4, -1],
                [ 5,  6]])
    """
    parts = _each(supports, "trajectory")
    if any(part is None for part in parts):
        raise TypeError("a trajectory must have a rollout_sample_support, got None")
    return IdSets.cat([IdSets(_int_tensor(support)) for support in parts])


def _sets_from_counts(ids, counts) -> IdSets:
    counts = _int_tensor(counts)
    IDS.check("counts of a sampling mask", counts, {})
    return IdSets.from_csr(
        _int_tensor(ids), torch.nn.functional.pad(counts.long().cumsum(0), (1, 0))
    )


def _int_tensor(x) -> torch.Tensor:
    """A tensor of integers: bytes are int32, other integers int32 or int64. Other types are kept,
    for the caller."""
    if isinstance(x, bytes):
        return (
            torch.frombuffer(bytearray(x), dtype=torch.int32)
            if x
            else torch.zeros(0, dtype=torch.int32)
        )
    found = x if isinstance(x, torch.Tensor) else torch.tensor(x)  # a copy: arrays may be read-only
    is_small = found.dtype in (
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    )
    return found.long() if is_small or not found.numel() else found
