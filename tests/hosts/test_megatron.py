"""Megatron-Core, each supported version with its own loss beside ours; the cases are in
megatron_cases.py, those with its schedules and more than tensor parallelism in
megatron_schedule_cases.py, and depths of multi-token prediction that learn from the main head in
megatron_soft_target_cases.py, which runs them all, with the mistakes of megatron_misuse_cases.py and
megatron_layer_cases.py."""

import cases
import pytest

VERSIONS = ("0.16.1", "0.19.2")
SCHEDULES = "megatron_schedule_cases.py"
SCRIPT = "megatron_soft_target_cases.py"
SAME = (
    *(
        "plain",
        "sp",
        "tied",
        "sp, tied",
        "ddp main_grad",
        "ddp, sp, tied",
        "mtp",
        "mixin",
        "main_grad of the layer",
    ),
    *("mtp, sp, tied", "mtp, one sweep"),
    *("loss hook", "loss hook, sp", "loss hook, mtp", "loss hook, in place"),
    *(
        "one sweep",
        "one sweep, sp",
        "one sweep everywhere",
        "fusion without main_grad",
        "mixin without names",
    ),
    "HeadLoss",
)


SCHEDULED = (
    *(
        "pp",
        "pp, mtp",
        "pp, tp",
        "pp, tp, sp, tied",
        "pp, loss hook",
        "pp, one sweep",
        "recompute",
        "chunks",
    ),
    *(
        "cp, tp",
        "cp, tp, sp",
        "cp, loss hook",
        "cp, pp, mtp",
        "recomputed head",
        "recomputed head, one sweep",
    ),
    "distributed optimizer",
)


def result(version, case, ranks=2):
    return cases.result(f"megatron-{version}", SCRIPT, case, ranks)


def scheduled(version, case):
    return result(version, case, 4)


def with_versions(*names, script=SCRIPT):
    """A test's (version, case): each case with the versions that run it."""
    pairs = [(v, x) for v in VERSIONS for x in names if cases.runs(f"megatron-{v}", script, x)]
    return pytest.mark.parametrize(("version", "case"), pairs)


@with_versions(*SAME)
def test_losses_and_all_gradients_equal_megatrons(version, case):
    found = result(version, case)
    assert found["loss"] < 1e-6 and found["grads"] < 1e-6, found
    assert found["mutant"] > 9e-3  # one percent of dW would be seen
    assert found.get("others are nan", True)


@with_versions(*SCHEDULED, script=SCHEDULES)
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


SOFT = [
    (version, case)
    for version in VERSIONS
    for case in ("soft", "soft, sp, tied", "soft and hard", "cp")
    if cases.runs(f"megatron-{version}", SCRIPT, case)
]
SOFT += [("0.19.2", case) for case in ("soft, detached heads", "soft, hybrid, sp", "soft, mup")]


@pytest.mark.parametrize(("version", "case"), SOFT)
def test_depths_learn_from_the_main_heads_distribution_of_the_same_token(version, case):
    """Losses, what Megatron logs of the depths, and all gradients, beside whole logits in
    float64."""
    found = result(version, case)
    assert found["loss"] < 1e-6 and found["grads"] < 1e-6 < found["mutant"], found
    assert found.get("logged", 0) < 1e-6 and found.get("off by one is seen", True), found


@pytest.mark.parametrize("version", VERSIONS)
def test_targets_of_depths_end_with_each_packed_sequence(version):
    assert result(version, "packed") == {"equal": True}


@pytest.mark.parametrize("version", VERSIONS)
def test_likeliest_ids_are_looked_for_where_megatron_counts_them(version):
    assert result(version, "counted") == {"counted": True}


@with_versions("bf16", "loss hook, bf16", "loss hook, fused stock")
def test_losses_and_gradients_equal_megatrons_to_the_rounding_of_bf16(version, case):
    """Megatron's fused loss rounds the logits' gradient to bf16, whatever the model's type."""
    found = result(version, case)
    assert found["loss"] < 1e-3 and found["grads"] < 6e-3 < found["mutant"], found


@with_versions("pp, bf16", script=SCHEDULES)
def test_schedules_in_bf16_give_equal_losses_and_gradients_to_its_rounding(version, case):
    found = scheduled(version, case)
    assert found["loss"] < 1e-3 and found["grads"] < 6e-3 < found["mutant"], found


@pytest.mark.parametrize("version", VERSIONS)
def test_labels_outside_of_the_vocabulary_are_what_was_chosen(version):
    found = result(version, "ignored labels")
    assert (
        found["megatron"]
        and found["none"] == [0, 0]
        and found["index"] == [0, "nan"]
        and found["others"] < 1e-5
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_without_labels_are_megatrons_own(version):
    assert result(version, "without labels") == {"equal": True, "calls": 0}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", ["refusals", "soft, refusals", "check call"])
def test_what_cannot_work_is_refused_and_what_was_installed_goes_away(version, case):
    assert result(version, case) == {}


MISUSES = (
    *("classes with the mixin", "blocks", "metrics over the vocabulary's group", "observed"),
    *("terms by themselves", "ranks that differ", "arguments of another form"),
    *("hooks of the output layer", "losses that replace ours", "arguments of a head"),
    *("metrics of depths", "weights of no loss", "attributes that are set later"),
    "true vocabularies",
    *("failures of one rank", "layers that are replaced later", "layers that reduce otherwise"),
)


@with_versions(*MISUSES)
def test_a_head_that_nothing_would_call_or_that_ranks_do_not_share_is_refused(version, case):
    assert result(version, case) == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_head_loss_that_is_assigned_to_a_mixin_is_the_one_that_install_takes(version):
    found = result(version, "assigned heads")
    assert found["loss"] == found["grads"] == 0 < found["mutant"] and found["none"], found


@with_versions("stages", script=SCHEDULES)
def test_a_stage_without_a_head_has_nothing_installed(version, case):
    assert scheduled(version, case) == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_of_another_type_than_the_model_are_refused_or_kept(version):
    found = result(version, "fp32 logits")
    assert found["loss"] < 1e-6 and found["grads"] < 1e-6 < found["mutant"]


@pytest.mark.parametrize("version", VERSIONS)
def test_an_installation_that_fails_leaves_nothing_behind(version):
    assert result(version, "failures") == {"observed": 0, "observes": True}


def test_a_second_head_on_a_hybrid_model_is_refused():
    assert result("0.19.2", "hybrid, refusals") == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_copy_runs_with_its_own_weights_and_the_check_call_leaves_no_trace(version):
    found = result(version, "copies")
    assert found["modes"] and found["observed"] == 0 and found["difference"] < 1e-5, found


@with_versions("own terms")
def test_own_terms_metrics_and_the_true_vocabulary(version, case):
    found = result(version, case)
    assert found["loss"] < 1e-6 and found["entropy"] > 0


@pytest.mark.parametrize("version", VERSIONS)
def test_the_block_of_the_readme_runs(version):
    found = result(version, "documented")
    assert found["loss"] > 0 and found["removed"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_script_of_the_guide_runs_on_cpus(version):
    found = result(version, "documented on CPUs")
    assert found["loss"] > 0 and found["all"]
