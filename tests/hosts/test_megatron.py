"""Megatron-Core, each supported version with its own loss beside ours; the cases are in megatron_cases.py, those
with its schedules and more than tensor parallelism in megatron_schedule_cases.py, and depths of multi-token prediction
that learn from the main head in megatron_soft_target_cases.py."""

import cases
import pytest

VERSIONS = ("0.16.1", "0.19.2")
SAME = (
    *("plain", "sp", "tied", "sp, tied", "ddp main_grad", "ddp, sp, tied", "mtp", "mixin", "main_grad of the layer"),
    *("mtp, sp, tied", "mtp, one sweep"),
    *("loss hook", "loss hook, sp", "loss hook, mtp", "loss hook, in place"),
    *("one sweep", "one sweep, sp", "one sweep everywhere", "fusion without main_grad", "mixin without names"),
    "HeadLoss",
)


SCHEDULED = (
    *("pp", "pp, mtp", "pp, tp", "pp, tp, sp, tied", "pp, loss hook", "pp, one sweep", "recompute", "chunks"),
    *("cp, tp", "cp, tp, sp", "cp, loss hook", "cp, pp, mtp", "recomputed head", "recomputed head, one sweep"),
    "distributed optimizer",
)


def result(version, case, script="megatron_cases.py", ranks=2):
    return cases.result(f"megatron-{version}", script, case, ranks)


def scheduled(version, case):
    return result(version, case, "megatron_schedule_cases.py", 4)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", SAME)
def test_losses_and_all_gradients_equal_megatrons(version, case):
    found = result(version, case)
    assert found["loss"] < 1e-6 and found["grads"] < 1e-6, found
    assert found["mutant"] > 9e-3  # one percent of dW would be seen
    assert found.get("others are nan", True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", SCHEDULED)
def test_megatrons_schedules_give_equal_losses_and_gradients_on_every_rank(version, case):
    """Gradients are sums over four microbatches; the optimizer's are those of its second step."""
    found = scheduled(version, case)
    assert found["loss"] < 1e-6 and found["grads"] < 2e-6 and found.get("updates", 0) < 2e-6, found
    assert found["mutant"] > 9e-3


HYBRID = ("hybrid", "hybrid, mtp", "hybrid, sp", "hybrid, tied", "hybrid, mup", "hybrid, loss hook")


@pytest.mark.parametrize("case", ["processor", "mup", "accepted", *HYBRID, "pp, hybrid"])
def test_what_the_newer_version_has(case):
    found = scheduled("0.19.2", case) if case == "pp, hybrid" else result("0.19.2", case)
    assert found["loss"] < 1e-6 and found["grads"] < 1e-6 and found["mutant"] > 9e-3, found


SOFT = [(version, case) for version in VERSIONS for case in ("soft", "soft, sp, tied", "soft and hard", "cp")]
SOFT += [("0.19.2", case) for case in ("soft, detached heads", "soft, hybrid, sp", "soft, mup")]


def soft_targets(version, case):
    return result(version, case, "megatron_soft_target_cases.py")


@pytest.mark.parametrize(("version", "case"), SOFT)
def test_depths_learn_from_the_main_heads_distribution_of_the_same_token(version, case):
    """Losses, what Megatron logs of the depths, and all gradients, beside whole logits in float64."""
    found = soft_targets(version, case)
    assert found["loss"] < 1e-6 and found["grads"] < 1e-6 < found["mutant"], found
    assert found.get("logged", 0) < 1e-6 and found.get("off by one is seen", True), found


@pytest.mark.parametrize("version", VERSIONS)
def test_targets_of_depths_end_with_each_packed_sequence(version):
    assert soft_targets(version, "packed") == {"equal": True}


@pytest.mark.parametrize("version", VERSIONS)
def test_terms_of_depths_that_nothing_would_compute_are_refused(version):
    found = soft_targets(version, "refusals")
    assert "a model with depths of multi-token prediction, got fused=True and mtp_num_layers=None" in found["no depths"]
    assert "got fused=False and mtp_num_layers=2" in found["logits"]
    assert "through an output_processor: use install(model, head)" in found["processor"]
    assert "depth_terms must be of type list or tuple or None, got Term" in found["no list"]


@pytest.mark.parametrize("version", VERSIONS)
def test_likeliest_ids_are_looked_for_where_megatron_counts_them(version):
    assert soft_targets(version, "counted") == {"counted": True}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", ["bf16", "loss hook, bf16", "loss hook, fused stock", "pp, bf16"])
def test_losses_and_gradients_equal_megatrons_to_the_rounding_of_bf16(version, case):
    """Megatron's fused loss rounds the logits' gradient to bf16, whatever the model's type."""
    found = scheduled(version, case) if case.startswith("pp") else result(version, case)
    assert found["loss"] < 1e-3 and found["grads"] < 6e-3 < found["mutant"], found


@pytest.mark.parametrize("version", VERSIONS)
def test_labels_outside_of_the_vocabulary_are_what_was_chosen(version):
    found = result(version, "ignored labels")
    assert found["megatron"] and found["none"] == [0, 0] and found["index"] == [0, "nan"] and found["others"] < 1e-5


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_without_labels_are_megatrons_own(version):
    assert result(version, "without labels") == {"equal": True, "calls": 1}


@pytest.mark.parametrize("version", VERSIONS)
def test_what_cannot_work_is_refused_and_what_was_installed_goes_away(version):
    found = result(version, "refusals")
    for case, part in {
        "second": "replaced already",
        "second, loss only": "replaced already",
        "subclass": "MegatronHeadMixin",
        "other model": "model must be of type GPTModel",
        "swapped": "head must be of type MegatronHead or HeadLoss, got GPTModel",
        "class": "got the class GPTModel",
        "chunks": "got a list of 1: pass the chunk that has the output layer",
        "other head": "got Term",
        "linear": "linear needs fused=True, where there are hidden states, got fused=False",
        "inplace": "Options(inplace=True) is for logits, fused=False",
        "sum": "reduction='mean' or 'none', got 'sum'",
        "terms": "terms must be of type list or tuple or None, got Term",
        "vocab_size": "at most the 256 rows of the output layer, got 257",
        "never called": "no loss came through",
        "two models": "no loss came through",
        "patched by others": "other_kernels has replaced",
        "no output layer": "last pipeline stage",
        "no group": "got None",
        "defer_embedding_wgrad_compute": "defer_embedding_wgrad_compute=True",
        "defer_embedding_wgrad_compute by the processor": "defer_embedding_wgrad_compute=True",
        "fp8_output_proj": "fp8_output_proj=True",
        "fp8_output_proj by the processor": "fp8_output_proj=True",
        "second group": "got gtp_remat_size=2",
        "logits of another type": "output_dtype (--output-logit-dtype) must be the model's torch.float32, got torch.bf",
        "adapter": "ColumnParallelLinear without a forward of its own, got Adapted",
        "gathered": "this rank's 128 columns, got 256",
    }.items():
        assert part in found[case], (case, found[case])
    assert found["restored"] and found["unused is removed"] and found["usable after all"]


@pytest.mark.parametrize("version", VERSIONS)
def test_only_the_chunk_with_the_output_layer_is_taken(version):
    found = scheduled(version, "stages")
    assert "got a list of 2: pass the chunk that has the output layer" in found["list"]
    for fused in (True, False):
        assert "install on the last pipeline stage alone, in its last chunk" in found[f"first chunk, fused={fused}"]
    assert found["last chunk"] and found["deferring"]


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_of_another_type_than_the_model_are_refused_or_kept(version):
    found = result(version, "fp32 logits")
    assert "must be the model's torch.bfloat16, got torch.float32: use fused=False" in found["refused"]
    assert found["loss"] < 1e-6 and found["grads"] < 1e-6 < found["mutant"]


@pytest.mark.parametrize("version", VERSIONS)
def test_an_installation_that_fails_leaves_nothing_behind(version):
    assert result(version, "failures") == {"observed": 0, "observes": True}


def test_a_second_head_on_a_hybrid_model_is_refused():
    assert "replaced already" in result("0.19.2", "hybrid, refusals")["second"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_check_call_sees_another_loss_and_one_that_is_not_in_the_path(version):
    found = result(version, "check call")
    assert "differs" in found["differs"] and "did not come through" in found["elsewhere"] and found["removed"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_copy_runs_with_its_own_weights_and_the_check_call_leaves_no_trace(version):
    found = result(version, "copies")
    assert found["modes"] and found["observed"] == 0 and found["difference"] < 1e-5, found


@pytest.mark.parametrize("version", VERSIONS)
def test_own_terms_metrics_and_the_true_vocabulary(version):
    found = result(version, "own terms")
    assert found["loss"] < 1e-6 and found["entropy"] > 0


@pytest.mark.parametrize("version", VERSIONS)
def test_the_block_of_the_readme_runs(version):
    found = result(version, "documented")
    assert found["loss"] > 0 and found["removed"]


def test_an_unsupported_version_is_named():
    from tp_headloss import integrations

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integrations.importlib.metadata, "version", lambda name: "0.15.3")
        with pytest.raises(ImportError, match=r"megatron-core >= 0.16.1, < 0.20 .*got 0.15.3"):
            integrations.require("megatron-core")
        for version in ("0.16.1", "0.19.2rc1", "0.19.2+cu13"):
            patch.setattr(integrations.importlib.metadata, "version", lambda name, version=version: version)
            assert integrations.require("megatron-core") >= (0, 16, 1)
        patch.setattr(integrations.importlib.metadata, "version", lambda name: "0.20.0")
        with pytest.raises(ImportError, match=r"got 0.20.0"):
            integrations.require("megatron-core")
    with pytest.raises(ImportError, match=r"pip install 'tp_headloss\[torchtitan\]'\), and there is none"):
        integrations.require("torchtitan")


def test_a_checkout_of_the_sources_says_its_own_version(tmp_path, monkeypatch):
    from tp_headloss import integrations

    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("__version__ = '0.17.1'")
    monkeypatch.syspath_prepend(tmp_path)
    assert integrations.require("megatron-core") == (0, 17, 1)
