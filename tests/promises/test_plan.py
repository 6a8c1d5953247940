"""`python -m tp_headloss plan`: its memory is what its own lines, run as printed, allocate; its
floors are by hand."""

import argparse
import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peak import peak_bytes
from ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tp_headloss
from tp_headloss import plan
from tp_headloss.engine import eager
from tp_headloss.linear_head import request as linear_request

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def measured(way, head, device, from_hidden) -> int:
    """Bytes that the call of a way allocates for its loss and gradients, on one rank."""
    generator, dtype = torch.Generator(device).manual_seed(0), DTYPES[head.dtype]

    def draw(*shape):
        x = torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator)
        return x.requires_grad_()

    # of one rank, as if it were the whole vocabulary
    shard = tp_headloss.VocabShard(0, head.width, head.width)
    labels = torch.randint(head.width, (head.tokens,), device=device, generator=generator)
    names = {**vars(tp_headloss), "F": F, "shard": shard, "labels": labels}
    if from_hidden:
        leaves = draw(head.tokens, head.hidden), draw(head.width, head.hidden)
        names |= dict(zip(("hidden", "weight"), leaves))
        leaves[1].main_grad = torch.zeros_like(leaves[1], dtype=torch.float32)
    else:
        leaves = (draw(head.tokens, head.width),)
    code = compile(way.call, way.name, "eval")

    def step():
        if not from_hidden:  # a head's logits are no leaf: in place writes over them
            names["logits"] = leaves[0].view_as(leaves[0])
        loss = eval(code, names)
        loss = getattr(loss, "loss", loss)
        return torch.autograd.grad(loss, leaves, allow_unused="main_grad" in way.call)

    return peak_bytes(step, device)


def head_of(dtype, tp=1, **sizes):
    return plan.Head(
        **{"tokens": 512, "vocab": 8000 * tp, "tp": tp, "dtype": dtype, "hidden": 128, **sizes}
    )


ON_CPU = [
    *((dtype, False) for dtype in ("bf16", "fp32")),
    ("fp32", True),  # bf16 has copies of the operands there
]
CASES = [
    pytest.param(
        dtype, hidden, way.name, id=f"{dtype}-{'hidden' if hidden else 'logits'}-{way.name}"
    )
    for dtype, hidden in ON_CPU
    for way in plan.ways(head_of(dtype), hidden)
    if "one read" not in way.name
]


@pytest.mark.parametrize("dtype, from_hidden, name", CASES)
def test_the_memory_is_what_the_call_allocates(dtype, from_hidden, name, monkeypatch):
    monkeypatch.setattr(eager, "BLOCK_ELEMENTS", 1 << 15)  # whose temporaries no GPU has
    monkeypatch.setattr(linear_request, "free_share", lambda device: plan.ASSUMED_SHARE)
    head = head_of(dtype)
    (way,) = [way for way in plan.ways(head, from_hidden) if way.name == name]
    found = measured(way, head, torch.device("cpu"), from_hidden)
    assert way.memory - MIB // 4 <= found <= way.memory + 2 * MIB, (found / MIB, way.memory / MIB)


def run_as_printed(group, device, dtype, from_hidden, vocab):
    """Errors of loss and gradients of each call that the command prints, relative to those of
    float64, by way. Of 4096 columns, those from vocab on are padding, with numbers that matter
    where they are counted."""
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    head, generator, errors = (
        plan.Head(512, vocab, size, dtype, 16, None if vocab == 4096 else 4096),
        torch.Generator().manual_seed(0),
        {},
    )
    table, definitions = (
        plan.report(head, from_hidden, None, None).split("what to write\n")[1].split("\n\n")
    )
    shapes = {"hidden": (512, 16), "weight": (4096, 16)} if from_hidden else {"logits": (512, 4096)}
    whole = {
        name: torch.randn(shape, generator=generator).to(DTYPES[dtype])
        for name, shape in shapes.items()
    }
    labels = torch.randint(vocab, (512,), generator=generator)
    exact = [x.double().requires_grad_() for x in whole.values()]
    columns = exact[0] @ exact[1].T if from_hidden else exact[0]
    expected = F.cross_entropy(columns[:, :vocab], labels)
    grads = dict(zip(whole, torch.autograd.grad(expected, exact)))

    def local(name, x):
        return x if name == "hidden" else x.chunk(size, 0 if name == "weight" else 1)[rank]

    def gather(x):
        return DTensor.from_local(
            x, DeviceMesh.from_group(group, device.type), [Shard(-1)]
        ).full_tensor()

    for line in table.splitlines():
        name, call = line[:24].strip(), line[42:]
        if "one read" in name and (
            device.type == "cpu" or torch.cuda.get_device_capability() != (9, 0)
        ):
            continue
        leaves = {
            key: torch.nn.Parameter(local(key, x).clone().to(device)) for key, x in whole.items()
        }
        names = {
            **vars(tp_headloss),
            "F": F,
            "group": group,
            "gather": gather,
            "labels": labels.to(device),
            **leaves,
        }
        if from_hidden:
            leaves["weight"].main_grad = torch.zeros_like(leaves["weight"], dtype=torch.float32)
        else:
            # a head's logits are no leaf: in place writes over them
            names["logits"] = leaves["logits"].clone()
        exec("\n".join(line for line in definitions.splitlines() if " = " in line), names)
        loss = eval(call, names)
        loss = getattr(loss, "loss", loss)
        loss.backward()
        found = {
            key: x.main_grad if key == "weight" and "main_grad" in call else x.grad
            for key, x in leaves.items()
        }
        pairs = [
            (loss.detach(), expected.detach()),
            *((found[key], local(key, grads[key])) for key in leaves),
        ]
        errors[name] = max(
            float((ours.cpu().double() - x).abs().max() / x.abs().max()) for ours, x in pairs
        )
    return errors


@pytest.mark.parametrize("from_hidden", [False, True])
@pytest.mark.parametrize(
    "dtype, vocab", [("bf16", 4096), ("fp32", 4096), pytest.param("fp32", 3000, id="padded")]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_each_printed_call_has_the_loss_and_the_gradients_of_the_whole_vocabulary(
    tp, dtype, vocab, from_hidden
):
    """A dH that is a rank's part alone is wrong by its own size, and a loss that counts padding
    by a part of it."""
    for errors in on_ranks(tp, run_as_printed, dtype, from_hidden, vocab):
        ways = {way.name for way in plan.ways(plan.Head(512, 4096, tp, dtype, 16), from_hidden)}
        assert {name for name in ways if "one read" not in name} <= set(errors) <= ways
        assert max(errors.values()) < {"bf16": 2**-6, "fp32": 2**-18}[dtype], errors


def test_every_way_is_run():
    """Those of `CASES` and of one read are all that there are."""
    from_hidden = {
        way.name
        for dtype in ("bf16", "fp32")
        for way in plan.ways(head_of(dtype, tokens=8192), True)
    }
    run = {name for case in CASES for *_, name in [case.values]}
    on_gpus = {"one read", "one read, in place", "gradients in fp8"}
    assert from_hidden - run == on_gpus and len(run) == 10


def test_blocks_are_smaller_where_the_budget_is():
    """Of sizes that the default budget does not hold."""
    for dtype, hidden in (("bf16", 512), ("fp32", 512), ("bf16", 8192)):
        head = head_of(dtype, tokens=16384, vocab=64000, tp=2, hidden=hidden)
        found = {way.name: way.memory for way in plan.ways(head, True)}
        assert (
            found["recompute"]
            < found["in place"]
            < found["logits"]
            < found["host: F.cross_entropy"]
        )
        assert found["one sweep, main_grad"] < found["in place"]


@pytest.mark.parametrize(
    "tokens, hidden, vocab, gemms, mib",
    [  # memory as measured on an H100
        (8192, 4096, 128256, 3, 3070),
        (8192, 2048, 128256, 3, 2537),
        (8192, 4096, 32064, 3, 815),
        # neither all logits nor dW in fp32 are within the share
        (16384, 8192, 256000, 4, None),
    ],
)
def test_the_default_is_one_sweep_within_its_share(tokens, hidden, vocab, gemms, mib, monkeypatch):
    monkeypatch.setattr(plan, "free_share", lambda device: plan.ASSUMED_SHARE)
    found = {way.name: way for way in plan.ways(plan.Head(tokens, vocab, 1, "bf16", hidden), True)}
    assert found["default"].gemms == gemms
    if mib is None:
        assert found["default"].memory == found["recompute"].memory
    else:
        assert found["default"].memory == pytest.approx(mib * MIB, rel=0.005)


# names in docs/bench -> a way, and whether dW is in a main_grad; the memory is that beyond dH and
# dW
PUBLISHED = {
    "materialised logits": ("logits", False),
    "materialised logits, in place": ("in place", False),
    "ours, recompute, epilogues, dW returned": ("recompute", False),
    "ours, recompute, dW returned": ("recompute", False),
    "ours, one sweep": ("one sweep, main_grad", True),  # a quarter
    "ours, fp8 gradients": ("gradients in fp8", False),
}


@pytest.mark.parametrize("file", ["tp1_linear", "tp4_linear", "tp1_linear_fp8_h100"])
def test_the_memory_is_what_the_benchmarks_measured_on_gpus(file, monkeypatch):
    # on GPUs of another size, too, where a call takes more without asking
    monkeypatch.setattr(plan, "free_share", lambda device: plan.ASSUMED_SHARE)
    rows = json.loads((ROOT / f"docs/bench/{file}.json").read_text())["rows"]
    compared = 0
    for row in rows:
        if row["implementation"] in PUBLISHED and row.get("memory_mib") is not None:
            head = plan.Head(row["tokens"], row["vocab"], row["tp"], "bf16", row["hidden"])
            name, main_grad = PUBLISHED[row["implementation"]]
            (way,) = [way for way in plan.ways(head, True) if way.name == name]
            found = (way.memory - head.gradients[0] - (0 if main_grad else head.gradients[1])) / MIB
            assert found == pytest.approx(row["memory_mib"], rel=0.02, abs=2), (row, found)
            compared += 1
    assert compared >= 4


@pytest.mark.cuda
@pytest.mark.parametrize("from_hidden", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_memory_is_what_the_call_allocates_on_a_gpu(dtype, from_hidden, device):
    """Sizes with several blocks. Rounding of the allocator, and workspaces of cuBLAS, are what is
    allowed."""
    head = head_of(dtype, tokens=8192, vocab=32000, hidden=1024)
    for way in plan.ways(head, from_hidden):
        if "one read" in way.name and torch.cuda.get_device_capability() != (9, 0):
            continue
        found = measured(way, head, torch.device(device), from_hidden)
        assert 0.97 * way.memory - 2 * MIB <= found <= 1.03 * way.memory + 40 * MIB, (
            way,
            found / MIB,
        )


def test_the_floor_is_bytes_over_bandwidth_and_flops_over_the_peak():
    """1000 tokens x 1000 ids of bf16: 2 MB of logits; a GEMM of a hidden size of 500 has 1e9
    flops."""
    head = plan.Head(1000, 2000, 2, "bf16", 500)

    def floors(from_hidden):
        return {
            way.name: plan.floor_ms(way, head, 2.0, 100.0) for way in plan.ways(head, from_hidden)
        }

    logits, hidden = floors(False), floors(True)
    assert logits["logits"] == logits["in place"] == pytest.approx(3e-3)  # 6 MB at 2 TB/s
    assert logits["one read"] == pytest.approx(2e-3)
    # of both ranks' logits, six times
    assert logits["host: F.cross_entropy"] == pytest.approx(12e-3)
    assert logits["host: the same in fp32"] == pytest.approx(32e-3)
    assert hidden["in place"] == pytest.approx(3e-2 + 3e-3) and hidden[
        "one sweep"
    ] == pytest.approx(3e-2 + 3e-3)
    assert hidden["recompute"] == pytest.approx(4e-2)


def run(*arguments):
    command = [sys.executable, "-m", "tp_headloss", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
def run_here(monkeypatch, capsys):
    """`python -m` as in `run`, but in this process, which has imported torch."""

    def run_module(*arguments):
        monkeypatch.setattr(sys, "argv", ["", *arguments])
        code = 0
        try:
            runpy.run_module("tp_headloss", run_name="__main__", alter_sys=True)
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run_module


def test_the_command_prints_the_table_and_what_it_assumes(run_here):
    sizes = (
        "--from",
        "hidden",
        "--hidden",
        "4096",
        "--vocab",
        "128256",
        "--tokens",
        "8192",
        "--tp",
        "2",
        "--dtype",
        "bf16",
    )
    code, assumed, error = run("plan", *sizes)
    assert code == 0, error
    assert "1002 MiB of logits a rank" in assumed and "'s, assumed; --tflops" in assumed
    code, given, error = run_here("plan", *sizes, "--bandwidth", "4.8", "--tflops", "7")
    assert code == 0, error
    assert "4.8 TB/s (given" in given and "7 TFLOP/s (given" in given
    for way in plan.ways(plan.Head(8192, 128256, 2, "bf16", 4096), True):
        assert f"{way.memory / MIB:8.0f}" in assumed and way.call in assumed


def test_columns_of_the_table_never_run_together():
    head = plan.Head(plan.MOST, plan.MOST, 1, "fp32", plan.MOST)
    table = plan.report(head, False, 1e-9, None).split("what to write\n")[1].split("\n\n")[0]
    for line, way in zip(table.splitlines(), plan.ways(head, False), strict=True):
        memory, time = line.removeprefix(way.name).removesuffix(way.call).split()
        assert float(memory) * MIB == pytest.approx(way.memory)
        assert float(time) == pytest.approx(plan.floor_ms(way, head, 1e-9, 1.0))


@pytest.mark.parametrize("from_hidden", [False, True])
def test_memory_and_floors_are_of_the_padded_size(from_hidden):
    """Those of as many ids, whatever part of them is padding."""
    unpadded = plan.ways(plan.Head(4096, 50304, 2, "bf16", 1024), from_hidden)
    padded = plan.ways(plan.Head(4096, 50257, 2, "bf16", 1024, 50304), from_hidden)
    assert [way[:4] for way in padded] == [way[:4] for way in unpadded]


def test_the_printed_shard_has_ids_and_padding(run_here):
    sizes = "plan", "--tokens", "8", "--vocab", "50257", "--padded-size", "50304"
    code, said, error = run_here(*sizes)
    assert code == 0, error
    assert "8 tokens x 50257 ids, padded_size=50304 in bf16" in said
    assert "shard = VocabShard.from_group(None, vocab_size=50257, padded_size=50304)\n" in said


WITH_COMMANDS = [
    path.relative_to(ROOT).with_suffix("")
    for path in sorted((ROOT / "tp_headloss").rglob("*.py"))
    if "def add_command(" in path.read_text()
]


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=str)
def test_a_module_that_is_run_in_the_place_of_its_command_says_what_to_write(path):
    command = [sys.executable, "-m", ".".join(path.parts), "--tokens", "8", "--vocab", "10"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 2 and result.stdout == ""
    meant = f"expected python -m tp_headloss {path.name} --tokens 8 --vocab 10\n"
    assert result.stderr.endswith(meant), result.stderr


SIZES = "--tokens", "8", "--vocab", "8"


@pytest.mark.parametrize("arguments, code, says", [
    (("--help",), 0, "python -m tp_headloss plan"),
    (("plan", "--help"), 0, "--bandwidth"),
    (("--version",), 0, f"tp_headloss {tp_headloss.__version__}"),
    (("pan",), 2, "invalid choice: 'pan'"),
    (("--tokens", "8", "plan", "--vocab", "8"), 2, "; options of a command stand behind it, as in plan --tokens ..\n"),
    (("plan", "--tokens", "8"), 2, "required: --vocab\n"),
    (("plan", "--tokens", "0", "--vocab", "8"), 2, "--tokens: expected a whole number from 1 to 4194304, got '0'"),
    (("plan", "--tokens", "8k", "--vocab", "8"), 2, "expected a whole number from 1 to 4194304, got '8k'"),
    (("plan", "--tokens", "15000000000000", "--vocab", "8"), 2, "--tokens: expected a whole number from 1 to"),
    (("plan", "--tokens", "8", "--vocab", "128256000000"), 2, "--vocab: expected a whole number from 1 to"),
    (("plan", "--tokens", "2097153", "--vocab", "131072", "--tp=2"), 2, "at most 137438953472, got 2097153"),
    (("plan", "--tokens", "2097152", "--vocab", "131072", "--tp", "2"), 0, "shard = "),
    (("plan", *SIZES, "--bandwidth", "fast"), 2, "expected TB/s, from 0.01 to 100, got 'fast'"),
    (("plan", *SIZES, "--bandwidth", "3350"), 2, "expected TB/s, from 0.01 to 100, got '3350'"),
    (("plan", *SIZES, "--from", "hidden", "--tflops", "0.989"), 2, "expected TFLOP/s, from 1 to 10000, got '0.989'"),
    (("plan", "--tok", "8", "--vocab", "8"), 2, "required: --tokens; unknown: --tok, did you mean --tokens?\n"),
    (("plan", "--tok=8", "--voc", "8"), 2, "unknown: --tok, --voc, did you mean --tokens and --vocab?\n"),
    (("plan", "--zzz"), 2, "required: --tokens, --vocab; unknown: --zzz\n"),
    (("--vers",), 2, "unrecognized arguments: --vers, did you mean --version?\n"),
    (("--verison", "plan", *SIZES), 2, "unrecognized arguments: --verison, did you mean --version?\n"),
    (("plan", *SIZES, "--form", "hidden"), 2, "plan: error: unrecognized arguments: --form hidden, did you mean"),
    (("plan", *SIZES, "--tp", "8", "--tp=4"), 2, "plan: error: argument --tp: expected once, got 2 times\n"),
    (("plan", *SIZES, "more"), 2, "plan: error: unrecognized arguments: more\n"),
    (("plan", *SIZES, "--padded-size", "7"), 2, "--padded-size: expected --vocab 8 or more, got 7\n"),
    (("plan", *SIZES, "--padded-size", "8"), 0, "shard = "),
    (("plan", *SIZES, "--tp", "9"), 2, "--tp: expected at most --vocab 8 ranks, got 9\n"),
    (("plan", *SIZES, "--tp", "8"), 0, "shard = "),
    (("plan", *SIZES, "--hidden", "8"), 2, "argument --hidden: needs --from hidden, got --from logits"),
    (("plan", *SIZES, "--tflops", "8"), 2, "argument --tflops: needs --from hidden, got --from logits"),
])  # fmt: skip
def test_the_command_answers_every_option(run_here, arguments, code, says):
    """What a process of its own would answer, see the test above, and with its exit code."""
    found, *said = run_here(*arguments)
    assert found == code and says in "".join(said), said


def test_a_misspelt_command_is_not_told_of_options(run_here):
    assert "stand behind" not in run_here("pan")[2]


def test_ranks_of_torchrun_print_one_table(run_here, monkeypatch):
    monkeypatch.setenv("RANK", "1")  # of an older job, as long as torchrun is not there
    assert "what to write" in run_here("plan", *SIZES)[1]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert run_here("plan", *SIZES) == (0, "", "")
    monkeypatch.setenv("RANK", "0")
    assert "what to write" in run_here("plan", *SIZES)[1]


def test_the_exit_code_of_the_command_is_that_of_its_process():
    code, _, error = run("--verison")
    assert code == 2 and "unrecognized arguments: --verison" in error


@pytest.mark.parametrize("speed", ["-1", "0", "nan", "1e9", "fast"])
@pytest.mark.parametrize("unit", [plan.terabytes, plan.teraflops])
def test_speeds_that_no_gpu_has_are_refused(unit, speed):
    with pytest.raises(argparse.ArgumentTypeError):  # which argparse shows
        unit(speed)
    with pytest.raises(argparse.ArgumentTypeError, match="expected TB/s"):
        plan.terabytes("3350")  # GB/s
    with pytest.raises(argparse.ArgumentTypeError, match="expected TFLOP/s"):
        plan.teraflops("19500")  # GFLOP/s


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_default_is_the_way_that_such_a_call_takes(dtype, monkeypatch):
    for module in (plan, linear_request):
        monkeypatch.setattr(module, "free_share", lambda device: plan.ASSUMED_SHARE)
    (way,) = [w for w in plan.ways(head_of(dtype), True) if w.name == "default"]
    weight = torch.zeros(8000, 128, dtype=DTYPES[dtype], requires_grad=True)
    labels = torch.zeros(512, dtype=torch.int64)
    hidden = torch.zeros(512, 128, dtype=DTYPES[dtype])
    found = tp_headloss.HeadLoss().explain_linear(hidden, weight, labels)
    assert (found.way == "one sweep") == (way.gemms == 3), (found, way)


def test_a_way_is_in_the_table_or_said_to_be_left_out():
    everything = {way.name for way in plan.ways(plan.Head(8192, 32000, 1, "bf16", 1024), True)}
    for dtype, vocab, hidden in itertools.product(DTYPES, (32000, 50257), (1024, 1000)):
        head = plan.Head(8192, vocab, 1, dtype, hidden)
        missing = everything - {way.name for way in plan.ways(head, True)}
        said = " ".join(plan.left_out(head, True))
        hosts = {"host: the same in fp32"}  # logits in fp32 have none
        assert all(name.split(",")[0] in said for name in missing - hosts), (head, missing, said)
        assert all(
            line in plan.report(head, True, None, None) for line in plan.left_out(head, True)
        )


def test_one_read_is_planned_where_it_can_be():
    for vocab, tp, can in ((1024, 2, True), (1001, 1, False), (50257, 2, False), (2048, 16, False)):
        found = plan.ways(plan.Head(8, vocab, tp, "bf16", 64), False)
        assert any(way.name == "one read" for way in found) == can
