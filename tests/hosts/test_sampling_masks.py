"""Sets of ids in the formats of vLLM, prime-rl, NeMo-RL and SkyRL, by signature: what goes in comes
out."""

import base64
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sets_problem import listed

from tp_headloss import vocab_statistics
from tp_headloss.integrations import sampling_masks

COMPLETIONS = [[[3, 42, 7], [9]], [[], [1, 2], [5]]]  # ids of each token of two
EVERY = [row for rows in COMPLETIONS for row in rows]


def flat(rows):
    return [i for row in rows for i in row], [len(row) for row in rows]


def nested(rows):
    return SimpleNamespace(token_ids=rows)


def offsets(rows):
    ids, counts = flat(rows)
    return SimpleNamespace(token_ids=ids, offsets=np.cumsum([0, *counts]).tolist())


def arrays(rows):
    ids, counts = flat(rows)
    lists = namedtuple(
        "SamplingMaskLists", "token_ids offsets cu_num_generated_tokens", defaults=(None,)
    )
    return lists(np.array(ids, np.int32), np.cumsum([0, *counts]))


@pytest.mark.parametrize("form", [list, nested, offsets, arrays], ids=lambda form: form.__name__)
def test_masks_of_vllm(form):
    sets = sampling_masks.from_vllm([form(rows) for rows in COMPLETIONS])
    assert listed(sets) == EVERY and sets.spans.shape == (5, 2)
    assert listed(sampling_masks.from_vllm([form([]), form(COMPLETIONS[0])])) == COMPLETIONS[0]


def test_a_completion_without_a_mask_is_refused():
    with pytest.raises(TypeError, match=r"must be vLLM's SamplingMask .* got None"):
        sampling_masks.from_vllm([nested(COMPLETIONS[0]), None])


LOGPROBS = [{4: SimpleNamespace(logprob=-1.0), 45: SimpleNamespace(logprob=-2.0)}, {7: None}]
NO_MASKS = {
    "logprobs": (LOGPROBS, "dicts"),
    "logprobs of a prompt": ([None, *LOGPROBS], "dicts"),
    "one token's": (LOGPROBS[0], "dict"),
    "flat ones": (SimpleNamespace(token_ids=[4, 45, 7], logprobs=[-1.0, -2.0, -1.0]), "Simple"),
}


@pytest.mark.parametrize("case", NO_MASKS)
@pytest.mark.parametrize("host", ["from_vllm", "from_prime_rl", "from_skyrl"])
def test_logprobs_are_no_masks(host, case):
    """The likeliest ids of a token are not those that the sampler kept."""
    given, got = NO_MASKS[case]
    words = f"got {got}.*, as logprobs are: pass the sampling mask, of vLLM the completion's"
    with pytest.raises(TypeError, match=words):
        getattr(sampling_masks, host)([given])


def test_masks_whose_ids_are_not_each_in_one_set_are_refused():
    for ids, counts in (([1, 2, 3, 4], [1, 1]), ([1, 2], [3, -1])):
        with pytest.raises(ValueError, match=r"so that each id is in one set, got \[0, "):
            sampling_masks.from_prime_rl([SimpleNamespace(ids=ids, counts=counts)])
    with pytest.raises(
        ValueError, match=r"from 0 to 3, so that each id is in one set, got \[0, 2\]"
    ):
        sampling_masks.from_vllm([SimpleNamespace(token_ids=[1, 2, 3], offsets=[0, 2])])
    with pytest.raises(ValueError, match=r"sizes in \[0, 2\], got \[5, -3\]"):
        sampling_masks.from_nemo_rl(
            SimpleNamespace(token_ids=torch.ones(1, 2, 2).int(), sizes=torch.tensor([[5, -3]]))
        )
    with pytest.raises(
        TypeError, match=r"sizes of a sampling mask must be int64 or int32, got torch\.float32"
    ):
        sampling_masks.from_nemo_rl(
            SimpleNamespace(token_ids=torch.ones(1, 1, 2).int(), sizes=torch.ones(1, 1))
        )
    small = np.array([1, 2], np.uint16)
    assert (
        sampling_masks.from_vllm([[small]]).tolist()
        == sampling_masks.from_vllm([[[1, 2]]]).tolist()
        == [[1, 2]]
    )
    for wrong in ([[1.7, 2]], [[True, False]]):
        with pytest.raises(TypeError, match="must be int64 or int32"):
            sampling_masks.from_vllm([wrong])
    with pytest.raises(TypeError, match="counts of a sampling mask must be int64 or int32"):
        sampling_masks.from_prime_rl([SimpleNamespace(ids=[1], counts=torch.tensor([1.5]))])


def bytes_of(x):
    return np.array(x, np.int32).tobytes()


@pytest.mark.parametrize(
    "convert", [bytes_of, torch.tensor, lambda x: np.array(x, np.int32)], ids=range(3)
)
def test_masks_of_prime_rl(convert):
    masks = [
        SimpleNamespace(ids=convert(ids), counts=convert(counts))
        for ids, counts in map(flat, COMPLETIONS)
    ]
    sets = sampling_masks.from_prime_rl(masks)
    assert listed(sets) == EVERY
    nothing = SimpleNamespace(ids=convert([]), counts=convert([0, 0]))
    if convert is not torch.tensor:  # a list without elements is no integers
        assert listed(sampling_masks.from_prime_rl([nothing])) == [[], []]


def test_supports_of_skyrl():
    rows = [
        np.array([[3, 42, 7], [9, -1, -1]], np.int32),
        torch.tensor([[-1, -1], [1, 2], [5, -1]]).int(),
    ]
    sets = sampling_masks.from_skyrl(rows)
    assert listed(sets) == EVERY and sets.spans is None
    packed = {
        "data": base64.b64encode(rows[0].tobytes()).decode(),
        "shape": [2, 3],
        "dtype": "int32",
    }
    sent = np.frombuffer(base64.b64decode(packed["data"]), packed["dtype"]).reshape(packed["shape"])
    assert listed(sampling_masks.from_skyrl([sent])) == COMPLETIONS[0]


def test_masks_of_nemo_rl():
    token_ids = torch.tensor(
        [[[0, 0, 0], [3, 42, 7], [9, 0, 0]], [[0, 0, 0], [1, 2, 0], [5, 0, 0]]], dtype=torch.int32
    )
    sizes = torch.tensor([[0, 3, 1], [0, 2, 1]])
    want = [[], [3, 42, 7], [9], [], [1, 2], [5]]
    assert (
        listed(sampling_masks.from_nemo_rl(SimpleNamespace(token_ids=token_ids, sizes=sizes)))
        == want
    )
    batch = {"sampling_mask_token_ids": token_ids, "sampling_mask_sizes": sizes}
    assert listed(sampling_masks.from_nemo_rl(batch)[:, 1:]) == [row for row in want if row]
    with pytest.raises(ValueError, match=r"must have sizes \[2, 3\], got \[2, 2\]"):
        sampling_masks.from_nemo_rl(batch | {"sampling_mask_sizes": sizes[:, 1:]})
    with pytest.raises(TypeError, match="token_ids of a sampling mask must be a tensor"):
        sampling_masks.from_nemo_rl(SimpleNamespace(token_ids=[[1]], sizes=sizes))


def test_sets_of_completions_beside_labels_of_sequences(device):
    """Prompts of 2 and 1 tokens, completions of 2 and 3; labels are the next tokens, ignored in the
    prompt."""
    tokens = torch.tensor([[8, 6, 42, 9, 0], [4, 7, 2, 5, 0]], device=device)
    sampled = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 1, 1, 0]], device=device).bool()
    completions = [COMPLETIONS[0], [[7, 30], *COMPLETIONS[1][1:]]]
    labels, where = tokens[:, 1:].masked_fill(~sampled[:, 1:], -100), sampled[:, 1:]
    sets = sampling_masks.from_vllm(map(nested, completions)).to(device).scatter(where)
    x = torch.randn(2, 4, 50, device=device)
    found = vocab_statistics(x, labels, want=("set_log_prob",), sets=sets).set_log_prob
    assert torch.equal(sets.contains(labels), where)
    for (b, s), ids in zip(
        where.nonzero().tolist(), [row for rows in completions for row in rows], strict=True
    ):
        expected = x[b, s, labels[b, s]].double() - x[b, s, ids].double().logsumexp(0)
        torch.testing.assert_close(found[b, s].double(), expected, rtol=1e-5, atol=1e-6)
    assert not found[~where].any()
