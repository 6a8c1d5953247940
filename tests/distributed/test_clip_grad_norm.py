"""`clip_grad_norm_`: the norm of the whole model on every rank, in whatever way its parameters are
sharded."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from ranks import Failure, on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tp_headloss import (
    HeadLoss,
    Init,
    Options,
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabShard,
    clip_grad_norm_,
)

V, PADDED, H, N = 100, 128, 8, 12
NORMS = pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf, "inf"])


def mesh_of(device, world_size):
    return init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("dp", "tp"))


class Model(torch.nn.Module):
    """A sharded embedding and head with a bias, and a replicated layer between them."""

    def __init__(self, shard, device):
        super().__init__()
        options = {"device": "cpu", "dtype": torch.float64}  # a seed draws other weights on a GPU
        self.embedding = VocabParallelEmbedding(H, shard, init=Init(1.0, seed=1), **options)
        generator = torch.Generator().manual_seed(2)
        self.body = torch.nn.Linear(H, H, **options)
        for p in self.body.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        head_loss = HeadLoss(options=Options(backend="torch"))  # which has float64 on GPUs, too
        self.head = VocabParallelHead(
            H, shard, head_loss=head_loss, init=Init(1.0, seed=3), bias=True, **options
        )
        self.to(device)

    def gradients(self):
        ids = (torch.arange(N, device=self.body.weight.device) * 31) % V
        self.zero_grad()
        self.head(self.body(self.embedding(ids)), ids.roll(1)).loss.backward()
        return self


def whole_gradients():
    """Gradients of the unsharded model, in float64 torch alone."""
    model = Model(VocabShard.from_group(None, V, padded_size=PADDED), torch.device("cpu"))
    ids = (torch.arange(N) * 31) % V
    logits = F.linear(model.body(model.embedding.weight[ids]), model.head.weight, model.head.bias)[
        :, :V
    ]
    F.cross_entropy(logits, ids.roll(1)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def plain(group, device):
    return Model(VocabShard.from_group(group, V, padded_size=PADDED), device).gradients()


def copied(group, device):
    return copy.deepcopy(
        Model(VocabShard.from_group(group, V, padded_size=PADDED), device)
    ).gradients()


def converted(group, device):
    """Made on the meta device, so that `to_empty` makes the parameters anew; tied and loaded
    again."""
    model, donor = (
        Model(VocabShard.from_group(group, V, padded_size=PADDED), device) for _ in range(2)
    )
    model.embedding.to("meta")
    model.embedding.to_empty(device=device)
    model.load_state_dict(donor.state_dict())
    model.head.weight = torch.nn.Parameter(model.head.weight.detach())
    return model.gradients()


def data_parallel(group, device):
    """Sharded over one dimension of a mesh, replicated over the other."""
    mesh = mesh_of(device, group.size())
    return Model(VocabShard.from_mesh(mesh, V, "tp", padded_size=PADDED), device).gradients()


def fsdp(group, device):
    mesh = mesh_of(device, group.size())
    model = Model(VocabShard.from_mesh(mesh, V, "tp", padded_size=PADDED), device)
    model.embedding.to_dtensor(mesh["tp"])
    model.head.to_dtensor(mesh["tp"])
    for part in (model.embedding, model.body, model.head, model):
        fully_shard(part, mesh=mesh["dp"])
    return model.gradients()


def dtensors(group, device):
    """DTensors of two meshes, one of them replicated."""
    model, mesh = (
        torch.nn.Module(),
        init_device_mesh(device.type, (group.size(),), mesh_dim_names=("tp",)),
    )
    for name, gradient in whole_gradients().items():
        placement = Shard(0) if "embedding" in name else Replicate()
        p = torch.nn.Parameter(distribute_tensor(gradient.to(device), mesh, [placement]))
        p.grad = p.detach().clone()
        model.register_parameter(name.replace(".", "_"), p)
    return model


def marked(group, device):
    """As Megatron-Core marks its parameters; one of them has its gradient in main_grad."""
    model, rank, size = torch.nn.Module(), group.rank(), group.size()
    for name, gradient in whole_gradients().items():
        sharded = "body" not in name
        part = gradient.chunk(size)[rank] if sharded else gradient
        p = torch.nn.Parameter(part.to(device).clone())
        p.tensor_model_parallel = sharded
        p.grad = p.detach().clone()
        if name == "head.weight":
            p.main_grad, p.grad = p.grad, torch.full_like(p, torch.nan)
        model.register_parameter(name.replace(".", "_"), p)
    return model


def clipped(group, device, make, max_norm, norm_type):
    """The norm, and the clipped gradients of this rank put together to whole ones."""
    model = make(group, device)
    given, shard = {}, None
    if make is marked:
        given["tensor_parallel_group"] = group
        # of this group, so that none of another one, which an earlier test left, speaks against it
        shard = VocabShard.from_group(group, V, padded_size=PADDED)
    total = clip_grad_norm_([*model.parameters()] * 2, max_norm, norm_type, **given)
    del shard
    return total, {
        name.replace(".", "_"): whole(getattr(p, "main_grad", p.grad), p, group, make)
        for name, p in model.named_parameters()
    }


def whole(gradient, p, group, make):
    if isinstance(gradient, DTensor):
        return gradient.full_tensor()
    over = getattr(p, "sharded_over", "") or getattr(p, "tensor_model_parallel", False)
    if not over:
        return gradient
    if make is data_parallel:
        group = mesh_of(gradient.device, group.size()).get_group("tp")
    parts = [torch.empty_like(gradient) for _ in range(group.size())]
    torch.distributed.all_gather(parts, gradient.contiguous(), group=group)
    return torch.cat(parts)


WAYS = [plain, copied, converted, data_parallel, fsdp, dtensors, marked]


@NORMS
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("make", WAYS)
def test_norm_and_gradients_are_those_of_the_unsharded_model(make, world_size, norm_type):
    for max_norm in (1e-3, 1e3):
        gradients = whole_gradients()  # torch clips them in place
        parameters = [torch.nn.Parameter(g) for g in gradients.values()]
        for p, g in zip(parameters, gradients.values()):
            p.grad = g
        expected = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        results = on_ranks(world_size, clipped, make, max_norm, norm_type)
        assert len({float(total) for total, _ in results}) == 1, "one norm on all ranks"
        for total, found in results:
            torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
            for name, gradient in gradients.items():
                torch.testing.assert_close(
                    found[name.replace(".", "_")], gradient, rtol=1e-9, atol=1e-15
                )


def noisy(group, device, factor):
    """The norm where replicated gradients differ by a factor, and a parameter has none."""
    model = plain(group, device)
    model.body.weight.grad *= 1 + group.rank() * factor
    model.body.bias.grad = None
    return clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("factor", [2.0**-50, 9.0])  # of rounding, and of a mistake
def test_ranks_whose_replicated_gradients_differ_have_one_norm(factor):
    first, second = on_ranks(2, noisy, factor)
    assert torch.equal(first, second) and torch.allclose(first, on_ranks(2, noisy, 0.0)[0])


# how one rank's call differs -> words of the error, after what must be equal
DIFFERENCES = {
    "max_norm": ((2.0, 2.0, False), "max_norm equal on all ranks, got 1 on one and 2 on another"),
    "norm_type": ((1.0, "inf", False), "norm_type equal on all ranks, got 2 on one and inf on"),
    "error_if_nonfinite": ((1.0, 2.0, True), "error_if_nonfinite equal on all ranks, got 0 on one"),
    "a frozen parameter": (
        None,
        "is frozen on all ranks or on none) equal on all ranks, got 4 on one and 5 on another",
    ),
    "a backward": (None, "all ranks make each backward) equal on all ranks, got 0 on one and 5 on"),
}


def different(group, device, make, how):
    """The error of a call that differs on the last rank, which is no neighbour of all others, or
    its norm. A GPU is waited for where all ranks ask for it."""
    model, last = make(group, device), group.rank() == group.size() - 1
    is_asked = device.type == "cuda" and how != "error_if_nonfinite"
    usual = 1.0, 2.0, is_asked
    max_norm, norm_type, error_if_nonfinite = (last and DIFFERENCES[how][0]) or usual
    error_if_nonfinite |= is_asked
    if last and how == "a backward":
        model.zero_grad()
    if last and how == "a frozen parameter":
        model.head.weight.requires_grad_(False).grad = None
    before = own_gradients(model)
    try:
        norm = clip_grad_norm_(
            model.parameters(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )
    except ValueError as error:
        torch.testing.assert_close(own_gradients(model), before, rtol=0, atol=0)
        return str(error)
    return float(norm)


def own_gradients(model):
    """Copies of this rank's parts, because a comparison of DTensors is a collective call."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [(x.to_local() if isinstance(x, DTensor) else x).clone() for x in found]


@pytest.mark.parametrize("how", DIFFERENCES)
@pytest.mark.parametrize("make, world_size", [(plain, 2), (fsdp, 4)])
def test_a_call_that_differs_on_one_rank_is_the_same_error_on_all(make, world_size, how):
    messages = on_ranks(world_size, different, make, how)
    if how == "error_if_nonfinite" and torch.cuda.is_available():
        *norms, said = messages
        assert all(map(math.isnan, norms)) and DIFFERENCES[how][1] in said
        return
    assert len({*messages}) == 1 and DIFFERENCES[how][1] in messages[0]


def with_an_empty_shard(group, device):
    """Rows that are all on the first rank, and a layer that no rank has used."""
    ends = [V] * (1 if group is None else group.size())
    shard = VocabShard.from_boundaries([0, *ends], V, group)
    model = Model(shard, device).gradients()
    model.unused = torch.nn.Linear(2, 2, device=device)
    return float(clip_grad_norm_(model.parameters(), 1.0))


def test_gradients_that_no_rank_has_and_those_of_an_empty_shard_are_no_difference():
    (expected,) = on_ranks(1, with_an_empty_shard)
    assert on_ranks(2, with_an_empty_shard) == [pytest.approx(expected)] * 2


def test_one_rank_is_torch():
    parameters = [torch.nn.Parameter(torch.randn(3, 5)) for _ in range(2)]
    others = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for p, other in zip(parameters, others):
        p.grad = torch.randn_like(p)
        other.grad = p.grad.clone()
    parameters.append(torch.nn.Parameter(torch.zeros(2)))
    expected = torch.nn.utils.clip_grad_norm_(others, 0.5)
    torch.testing.assert_close(clip_grad_norm_(iter(parameters), 0.5).float(), expected)
    torch.testing.assert_close([p.grad for p in parameters[:2]], [p.grad for p in others])
    assert clip_grad_norm_([], 1.0) == 0 and clip_grad_norm_(parameters[0], 1e9) > 0


def test_an_iterator_that_is_used_up_is_an_error():
    layer = torch.nn.Linear(2, 2)
    for made in (layer.parameters, lambda: iter([layer.weight]), lambda: (p for p in [layer.bias])):
        parameters = made()
        optimizer = torch.optim.SGD(parameters)
        assert optimizer.param_groups[0]["params"]
        with pytest.raises(
            ValueError, match=r"yields none: one that was read.*parameters\(\) anew"
        ):
            clip_grad_norm_(parameters, 1.0)


def test_no_gradient_at_all_is_a_warning_and_some_are_none():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    with pytest.warns(UserWarning, match="none of 3 trainable parameters has a gradient"):
        assert clip_grad_norm_(weights, 1.0) == 0
    weights[1].grad = torch.zeros(2)
    frozen = [torch.nn.Parameter(torch.ones(2), requires_grad=False)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clip_grad_norm_(weights, 1.0) == clip_grad_norm_(frozen, 1.0) == 0


def test_what_is_not_finite_is_an_error_if_that_is_asked_for():
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1.0, torch.inf])
    with pytest.raises(RuntimeError, match="must be finite, got inf"):
        clip_grad_norm_(p, 1.0, error_if_nonfinite=True)
    assert p.grad.tolist() == [1.0, torch.inf]
    assert clip_grad_norm_(p, 1.0).isinf()


def on_one_rank(group, device):
    """The norm of a parameter that is sharded over a group, which nobody has to name here."""
    p = torch.nn.Parameter(torch.zeros(2, device=device))
    p.tensor_model_parallel = True
    p.grad = torch.tensor([3.0, 4.0], device=device)
    try:
        return float(clip_grad_norm_([p], 1e9, tensor_parallel_group=None))
    except ValueError as error:
        return str(error)


def test_one_rank_alone_has_all_parts_of_a_sharded_parameter():
    assert on_one_rank(None, torch.device("cpu")) == 5.0, "without a process group"
    assert on_ranks(1, on_one_rank) == [5.0]
    said = "tensor_model_parallel=True: pass its group, tensor_parallel_group=.., got None"
    assert all(said in found for found in on_ranks(2, on_one_rank))


def of_another_group(group, device):
    """Norms of a weight of the vocabulary's group, by the groups of the call, or their errors."""
    mesh = mesh_of(device, group.size())
    tp = mesh.get_group("tp")
    p = torch.nn.Parameter(torch.zeros(2, device=device))
    p.tensor_model_parallel = True
    found = {}
    for has_shard in (False, True):
        shard = VocabShard.from_mesh(mesh, V, "tp") if has_shard else None
        for name, given in {"tp": tp, "dp": mesh.get_group("dp"), "world": group}.items():
            p.grad = torch.full_like(p, 1.0 + tp.rank())
            try:
                norm = clip_grad_norm_([p], 1e9, tensor_parallel_group=given)
            except ValueError as error:
                norm = str(error)
            found[name, has_shard] = norm if isinstance(norm, str) else float(norm)
        del shard
    # a parameter that says its group itself does not need the caller's
    model = Model(VocabShard.from_mesh(mesh, V, "tp", padded_size=PADDED), device).gradients()
    model.head.weight.tensor_model_parallel = True
    both = [
        clip_grad_norm_(model.parameters(), 1e9, tensor_parallel_group=g) for g in (None, group)
    ]
    return found, both


def test_a_group_whose_ranks_share_no_vocabulary_is_an_error_where_others_do():
    for found, both in on_ranks(4, of_another_group):
        right = 10**0.5
        assert found["tp", False] == pytest.approx(right) == found["tp", True]
        assert found["world", False] == pytest.approx(20**0.5), "nobody knows"
        for name in ("world", "dp"):
            assert "over which there is no VocabShard: pass shard.group" in found[name, True]
        assert "got the ranks [0, 1, 2, 3]" in found["world", True]
        assert torch.equal(*both)


def unmarked(group, device):
    """The part of a weight, which says nothing; then says that it is whole, and that it is
    sharded."""
    p = torch.nn.Parameter(torch.zeros(2, device=device))
    p.grad = torch.full_like(p, 1.0 + group.rank())
    with pytest.raises(
        ValueError,
        match=r"parameter\.tensor_model_parallel = True, got 1 parameters that say nothing",
    ):
        clip_grad_norm_([p], 1e9, tensor_parallel_group=group)
    norms = []
    for p.tensor_model_parallel in (False, True):
        norms.append(float(clip_grad_norm_([p], 1e9, tensor_parallel_group=group)))
    return norms


def test_a_group_of_parameters_that_do_not_say_whether_they_are_sharded_is_an_error():
    for rank, norms in enumerate(on_ranks(2, unmarked)):
        assert norms == pytest.approx([(1 + rank) * 2**0.5, 10**0.5])


def partial(group, device):
    mesh = init_device_mesh(device.type, (group.size(),))
    p = torch.nn.Parameter(distribute_tensor(torch.zeros(4, device=device), mesh, [Replicate()]))
    p.grad = DTensor.from_local(torch.ones(4, device=device), mesh, [Partial()])
    clip_grad_norm_(p, 1.0)


def test_a_gradient_that_is_still_to_be_summed_is_an_error():
    for result in on_ranks(2, partial, failures=True):
        assert (
            isinstance(result, Failure)
            and result.kind == "ValueError"
            and "is reduced" in result.message
        )


def test_what_is_no_parameter_is_refused():
    layer = torch.nn.Linear(2, 2)
    for given, name in (
        (layer, "Linear"),
        (layer.named_parameters(), "tuple"),
        ([{"params": []}], "dict"),
    ):
        with pytest.raises(
            TypeError, match=rf"parameters must be tensors, got {name}.*model.parameters\(\)"
        ):
            clip_grad_norm_(given, 1.0)
    gradients = [torch.ones(2), torch.ones(3)]
    with pytest.raises(TypeError, match="got 2 tensors that require no gradient and have none"):
        clip_grad_norm_(gradients, 1.0)
    assert clip_grad_norm_(layer.requires_grad_(False).parameters(), 1.0) == 0, "all frozen"


class Scaled(VocabParallelHead):
    """A head with a replicated parameter of its own."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.factor = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, hidden, labels):
        return super().forward(hidden * self.factor, labels)


def with_a_parameter_of_its_own(group, device):
    head = Scaled(8, VocabShard.from_group(group, 16), init=Init(1.0, seed=1)).to(device)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 8, generator=generator).to(device)
    head(hidden, torch.arange(5, device=device)).loss.backward()
    return float(clip_grad_norm_(head.parameters(), 1e9))


def test_what_a_subclass_of_a_head_adds_is_replicated():
    (expected,) = on_ranks(1, with_a_parameter_of_its_own)
    assert on_ranks(2, with_a_parameter_of_its_own) == [pytest.approx(expected)] * 2


def swapped(group, device):
    """Parameters that torch replaces in place, by load_state_dict and by hand."""
    head = VocabParallelHead(8, VocabShard.from_group(group, 16), init=Init(1.0, seed=1)).to(device)
    norms = []
    for how in ("loaded", "by hand"):
        torch.__future__.set_swap_module_params_on_conversion(how == "loaded")
        try:
            head.load_state_dict(head.state_dict())
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        if how == "by hand":
            torch.utils.swap_tensors(head.weight, torch.nn.Parameter(head.weight.detach().clone()))
        hidden = torch.ones(5, 8, device=device)
        head.zero_grad()
        head(hidden, torch.arange(5, device=device)).loss.backward()
        norms.append(float(clip_grad_norm_(head.parameters(), 1e9)))
    return norms


def test_parameters_that_torch_swaps_stay_sharded():
    (expected,) = on_ranks(1, swapped)
    assert on_ranks(2, swapped) == [pytest.approx(expected)] * 2


def used_without_its_forward(group, device):
    """A head that was made on meta, and whose weight another forward reads."""
    shard = VocabShard.from_group(group, 16)
    head = VocabParallelHead(8, shard, init=Init(1.0, seed=1), device="meta").to_empty(
        device=device
    )
    head.reset_parameters()
    head.weight.square().sum().backward()
    return float(clip_grad_norm_(head.parameters(), 1e9))


def test_a_weight_that_was_made_anew_is_sharded_before_any_forward():
    (expected,) = on_ranks(1, used_without_its_forward)
    assert on_ranks(2, used_without_its_forward) == [pytest.approx(expected)] * 2
