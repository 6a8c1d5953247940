"""`VocabParallelEmbedding(options=)`: ids that are unknown, or differ between ranks, are one error on
all of them."""

import pytest
import torch
from ranks import on_ranks

import tp_headloss as hl

H, V, PADDED = 16, 2051, 2176


def checked_ids(group, device, spoil):
    """The error of ids that are compared between ranks and with the vocabulary, of one call; then a
    call of known ids."""
    shard, options = hl.VocabShard.from_group(group, V, padded_size=PADDED), hl.Options(check=True)
    embedding = hl.VocabParallelEmbedding(H, shard, options=options, device=device)
    ids = torch.arange(6, device=device).view(3, 2) * 300
    wrong = ids.clone()
    spoil(wrong, 0 if group is None else group.rank())
    plain = hl.VocabParallelEmbedding(H, shard, device=device)
    plain.load_state_dict(embedding.state_dict())
    try:
        embedding(wrong)
    except ValueError as error:
        assert torch.equal(embedding(ids), plain(ids))
        return str(error)
    return "nothing"


def unknown_everywhere(ids, rank):
    ids[1, 1] = V


def negative_everywhere(ids, rank):
    ids[1, 1] = -1


def unknown_on_the_last_rank(ids, rank):
    ids[2, 0] += V * rank


def of_another_shard_on_the_last_rank(ids, rank):
    ids[2, 0] -= 1200 * rank


def of_the_same_shard_on_the_last_rank(ids, rank):
    ids[0, 1] += rank


UNKNOWN = rf"id of token 3 (flat index) must be in [0, {V}), got "
EQUAL = "ids must be equal on the ranks that share the vocabulary, got "
ON_RANK_1 = "on rank 0 of the group and {} on rank 1 for token {} (flat index); 1 such tokens"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (unknown_everywhere, f"{UNKNOWN}{V}; 1 such tokens"),
        (negative_everywhere, f"{UNKNOWN}-1; 1 such tokens"),
        (unknown_on_the_last_rank, f"{EQUAL}1200 {ON_RANK_1.format(1200 + V, 4)}"),
        (of_another_shard_on_the_last_rank, f"{EQUAL}1200 {ON_RANK_1.format(0, 4)}"),
        (of_the_same_shard_on_the_last_rank, f"{EQUAL}300 {ON_RANK_1.format(301, 1)}"),
    ],
)
def test_checked_ids_are_one_error_on_every_rank(spoil, message):
    assert on_ranks(2, checked_ids, spoil) == [message] * 2
    expected = message if message.startswith(UNKNOWN) else "nothing"
    assert on_ranks(1, checked_ids, spoil) == [expected]


def test_options_that_no_embedding_reads_are_refused():
    shard = hl.VocabShard(0, V, V)
    for name, value in (("backend", "torch"), ("inplace", True), ("transport", "sum")):
        with pytest.raises(ValueError, match="of an embedding must be check and validate, got"):
            hl.VocabParallelEmbedding(H, shard, options=hl.Options(**{name: value}))
    for options in (hl.Options(check=True), hl.Options(validate="full")):
        embedding = hl.VocabParallelEmbedding(H, shard, options=options)
        step = torch.compile(embedding, fullgraph=True, backend="eager")
        with pytest.raises(Exception, match="check=True looks at the ids' values"):
            step(torch.arange(3))


def of_one_seed(group, device, apart):
    """What calls with full validation say of a head and an embedding that `torch.nn.init` drew."""
    shard = hl.VocabShard.from_group(group, 53, padded_size=64)  # the last rank has fewer ids
    full = hl.Options(validate="full")
    head = hl.VocabParallelHead(4, shard, head_loss=hl.HeadLoss(options=full), device=device)
    embedding = hl.VocabParallelEmbedding(4, shard, options=full, device=device)
    ids = torch.arange(5, device=device)
    said = []
    for module, given in ((head, (torch.ones(5, 4, device=device), ids)), (embedding, (ids,))):
        module(*given)
        generator = torch.Generator(device).manual_seed(5 + apart * group.rank())
        torch.nn.init.normal_(module.weight, generator=generator)
        try:
            module(*given)
        except ValueError as error:
            said.append(str(error))
        module.reset_parameters()
        module(*given)
        torch.nn.init.zeros_(module.weight)  # which are equal on purpose
        module(*given)
    return said


def test_shards_that_were_drawn_from_one_seed_are_an_error_of_full_validation():
    words = "each rank must have its own rows of the weight, got equal ones on ranks 0 and 1"
    for said in on_ranks(2, of_one_seed, False):
        assert len(said) == 2 and all(x.startswith(words) for x in said), said
    assert on_ranks(2, of_one_seed, True) == [[], []]
