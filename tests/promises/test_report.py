"""`python -m tp_headloss`: what it says on one process and on ranks, and that a wrong result is not
called right."""

import compileall
import configparser
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from launcher import run_script
from ranks import on_ranks
from torch_defaults import torch_defaults

from tp_headloss import HeadLoss, __main__, __version__, meeting
from tp_headloss.version import digest_of_sources

ROOT = Path(__file__).parents[2]
CHECKS = ("cross-entropy and z-loss", "distillation", "linear head")


def test_the_command_reports_versions_and_checks_this_machine():
    result = subprocess.run(
        [sys.executable, "-m", "tp_headloss"], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    first = result.stdout.splitlines()[0]
    assert first.startswith(f"tp_headloss {__version__} in {ROOT / 'tp_headloss'}, Python ")
    assert f"torch {torch.__version__}" in result.stdout
    for check in CHECKS:
        assert f"ok: cpu: {check}" in result.stdout, result.stdout
    assert f"tp_headloss {__version__} of sources {digest_of_sources()}" in result.stdout
    assert "transformers: " in result.stdout and "symmetric memory: " in result.stdout


def report_on_ranks(group, device):
    return __main__.report([device], group)


def test_the_check_runs_over_a_group():
    for lines, passed in on_ranks(2, report_on_ranks):
        assert passed, lines
        assert all(any(f"2 ranks: {check}" in line for line in lines) for check in CHECKS), lines


def report_with_another_triton(group, device):
    other = {**__main__.versions(), "triton": f"3.{group.rank() % 2}"}
    with mock.patch.object(__main__, "versions", lambda: other):
        return __main__.report([device], group)


def test_ranks_with_other_versions_fail_before_they_compute():
    expected = "FAILED: triton must have one version on all ranks: 3.0 on rank 0, 2; 3.1 on rank 1"
    for lines, passed in on_ranks(3, report_with_another_triton):
        assert not passed and lines[-1] == expected


def report_of_other_sources(group, device):
    folder = f"/copy/{group.rank()}"
    of_rank = mock.patch.object(__main__, "digest_of_sources", lambda: f"5{min(group.rank(), 1)}")
    with of_rank, mock.patch.object(__main__, "FOLDER", folder):
        return __main__.report([device], group)


def test_ranks_with_other_sources_of_one_version_are_named_with_their_folders():
    each = [(0, 0), (1, 1), (1, 2)]
    told = "; ".join(
        f"{__version__} of sources 5{digit} in /copy/{rank} on rank {rank}" for digit, rank in each
    )
    for lines, passed in on_ranks(3, report_of_other_sources):
        assert not passed
        assert lines[-1] == f"FAILED: tp_headloss must have one version on all ranks: {told}"


def report_of_other_folders(group, device):
    with mock.patch.object(__main__, "FOLDER", f"/copy/{group.rank()}"):
        return __main__.report([device], group)


def test_equal_sources_may_be_in_other_folders():
    assert all(passed for _, passed in on_ranks(2, report_of_other_folders))


def test_the_digest_is_of_names_and_contents_of_all_sources(tmp_path):
    (tmp_path / "part").mkdir()
    found = [digest_of_sources(tmp_path)]
    for name, text in (("a.py", ""), ("a.py", "1"), ("part/b.cuh", ""), ("c.cu", "")):
        (tmp_path / name).write_text(text)
        found.append(digest_of_sources(tmp_path))
    assert len({*found}) == len(found)
    (tmp_path / "a.pyc").write_text("compiled")
    assert digest_of_sources(tmp_path) == found[-1]
    (tmp_path / "c.cu").rename(tmp_path / "d.cu")
    assert digest_of_sources(tmp_path) != found[-1]
    (tmp_path / "d.cu").rename(tmp_path / "c.cu")
    (tmp_path / "part").rename(tmp_path / "other")
    assert digest_of_sources(tmp_path) != found[-1]


def compiled_alone(folder):
    compileall.compile_dir(folder, quiet=1, legacy=True)
    for path in folder.rglob("*.py"):
        path.unlink()
    return folder


def zipped(folder):
    return zipfile.Path(shutil.make_archive(str(folder), "zip", folder))


@pytest.mark.parametrize("packed", [compiled_alone, zipped])
def test_the_digest_is_of_what_is_compiled_or_zipped(packed, tmp_path):
    found = []
    for number in (1, 1, 2):
        folder = tmp_path / "package"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "part").mkdir(parents=True)
        (folder / "part" / "a.py").write_text(f"NUMBER = {number}")
        times = 2e9 + len(found), 2e9 + len(found)
        os.utime(folder / "part" / "a.py", times)
        found.append(digest_of_sources(packed(folder)))
    assert found[0] == found[1] != found[2]


def report_of_an_odd_rank(group, device):
    dtype = torch.float64 if group.rank() else torch.float32
    with torch_defaults(dtype):
        return __main__.report([device], group)


def test_settings_of_other_ranks_are_named():
    for lines, passed in on_ranks(2, report_of_an_odd_rank):
        words = "warning: rank 1 starts with default dtype torch.float64, maybe of a sitecustom"
        assert passed and lines[-1].startswith(words)


@pytest.mark.parametrize(
    "code, line, passes",
    [
        ("__version__ = '3.6.0'", "triton 3.6.0 (>= 3.6)", True),
        ("__version__ = '3.2.0'", "FAILED: triton 3.2.0 (>= 3.6)", False),
        ("raise RuntimeError('no driver')", "FAILED: triton cannot be imported, RuntimeError: no driver", False),
        ("import nothing_of_this_name", "FAILED: triton cannot be imported, ModuleNotFoundError: No module", False),
    ],
)  # fmt: skip
def test_the_triton_is_the_one_that_an_import_finds(code, line, passes, monkeypatch, tmp_path):
    (tmp_path / "triton.py").write_text(code)
    monkeypatch.setitem(sys.modules, "triton", None)  # and what was there afterwards
    del sys.modules["triton"]
    monkeypatch.syspath_prepend(tmp_path)
    lines, passed = __main__.report([torch.device("cpu")], None)
    assert any(x.startswith(line) for x in lines), lines
    assert passed == passes


class Hook:
    """An import hook that blocks Triton."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"{name} is blocked")


def test_a_triton_that_a_hook_blocks_is_told_as_one_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    del sys.modules["triton"]
    monkeypatch.setattr(sys, "meta_path", [Hook(), *sys.meta_path])
    expected = "cannot be imported, ModuleNotFoundError: triton is blocked"
    assert __main__.version_of_triton() == expected
    assert f"FAILED: triton {expected} (>= 3.6)" in __main__.environment()


def test_a_cpu_needs_no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    lines, passed = __main__.report([torch.device("cpu")], None)
    assert passed and "triton not installed (>= 3.6)" in lines


OF_TORCHRUN = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_a_job_is_what_torchrun_says(monkeypatch):
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert __main__.job() == __main__.Job(2, 1, 1, 2, "localhost", 29500)
    assert __main__.job().address == "localhost:29500"
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert __main__.job().local_ranks == 2
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")  # of torchrun with one process
    assert __main__.job() == __main__.Job()
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):  # the others may be left of an older job
        monkeypatch.delenv(name)
    assert __main__.job() == __main__.Job()


@pytest.mark.parametrize(
    "given, says",
    [
        ({"WORLD_SIZE": "1", "RANK": "1"}, "RANK must be 0 of one rank, got 1: write torchrun"),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "abc"}, "LOCAL_RANK must be 0 of one rank, got abc"),
        (
            {"WORLD_SIZE": "1", "MASTER_PORT": "abc"},
            "MASTER_PORT must be a whole number from 1 to 65",
        ),
        ({"WORLD_SIZE": "1", "MASTER_PORT": "99999"}, "MASTER_PORT must be .*, got 99999"),
        (
            {"WORLD_SIZE": "1", "MASTER_ADDR": "no.such.host.invalid"},
            "MASTER_ADDR must be .*, got no.such",
        ),
        ({"RANK": "0"}, "WORLD_SIZE must be a whole number from 1 to .*, got nothing"),
        (
            {"LOCAL_RANK": "0"},
            "WORLD_SIZE must be .*, got nothing: .*unset WORLD_SIZE, RANK and LOC",
        ),
    ],
)
def test_half_a_job_is_not_taken_for_one_process(given, says, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        __main__.job()


def test_a_host_without_an_address_is_named_at_once(monkeypatch):
    def no_address(host, port):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    for name, value in {**OF_TORCHRUN, "MASTER_ADDR": "no.such.host"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=r"MASTER_ADDR must be .*, got no\.such\.host, which has no"
    ):
        __main__.expect_network(__main__.job())
    __main__.expect_network(__main__.Job())  # one process, which meets nobody


@pytest.fixture
def rank_0(monkeypatch):
    """Rank 0 of two, at a port that is free."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    given = {**OF_TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": port}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "ATTEMPT", 0.5)


OF_NO_MACHINE = "192.0.2.1"  # of an example


def test_rank_0_is_at_an_address_of_its_machine(rank_0, monkeypatch):
    __main__.expect_network(__main__.job())
    monkeypatch.setenv("MASTER_ADDR", OF_NO_MACHINE)
    says = (
        f"MASTER_ADDR must be the host of rank 0, got {OF_NO_MACHINE}, which is no address of this"
    )
    with pytest.raises(ValueError, match=says):
        __main__.expect_network(__main__.job())
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # on another machine, maybe
    __main__.expect_network(__main__.job())
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    monkeypatch.setenv("RANK", "1")
    __main__.expect_network(__main__.job())


def test_rank_0_may_be_behind_an_address_that_leads_to_its_machine(rank_0, monkeypatch):
    connect = socket.create_connection
    monkeypatch.setenv("MASTER_ADDR", OF_NO_MACHINE)
    monkeypatch.setattr(
        socket, "create_connection", lambda to, **given: connect(("localhost", to[1]), **given)
    )
    __main__.expect_network(__main__.job())


def test_an_address_at_which_a_proxy_answers_is_not_that_of_rank_0(rank_0, monkeypatch):
    with socket.create_server(("localhost", 0)) as proxy:
        connect, other = socket.create_connection, proxy.getsockname()
        monkeypatch.setenv("MASTER_ADDR", OF_NO_MACHINE)
        monkeypatch.setattr(
            socket, "create_connection", lambda to, **given: connect(other, **given)
        )
        with pytest.raises(ValueError, match="which is no address of this machine"):
            __main__.expect_network(__main__.job())


def test_a_store_that_does_not_come_ends_the_wait_in_time(rank_0, monkeypatch):
    port = os.environ["MASTER_PORT"]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(__main__, "WAIT", timedelta(seconds=1))
    begin = time.monotonic()
    says = f"expected rank 0 at localhost:{port}, where nobody listens after 1 seconds: .*\nwrite"
    with pytest.raises(SystemExit, match=says):
        __main__.join(__main__.job(), "gloo")
    assert 0.7 < time.monotonic() - begin < 20


def test_a_store_that_comes_late_is_found(rank_0):
    given = __main__.job()

    def serve():
        time.sleep(1)
        with socket.create_server(("", given.port)) as server:
            server.accept()

    server = threading.Thread(target=serve)
    server.start()
    meeting.expect_store(given, 60)
    server.join()


def test_a_port_that_is_used_is_named_as_one(rank_0):
    given = __main__.job()
    with socket.create_server(("", given.port)), pytest.raises(SystemExit) as ended:
        __main__.join(given, "gloo")
    assert "MASTER_PORT is used by another process" in str(ended.value)


def test_ranks_that_expect_other_numbers_of_ranks_are_told_so_at_once(rank_0):
    given = __main__.job()
    of_rank_1 = given._replace(rank=1, local_rank=1, ranks=3)
    with ThreadPoolExecutor() as pool:
        results = [pool.submit(meeting.met, x, 60.0) for x in (given, of_rank_1)]
        errors = [str(result.exception()) for result in results]
    assert errors == [
        "all ranks must have one WORLD_SIZE, got 2 on rank 0 and 3 on rank 1",
        "all ranks must have one WORLD_SIZE, got 3 on rank 1 and 2 on rank 0",
    ]


def test_ranks_that_all_come_meet(rank_0):
    given = __main__.job()
    with ThreadPoolExecutor() as pool:
        both = given, given._replace(rank=1, local_rank=1)
        stores = [result.result() for result in [pool.submit(meeting.met, x, 60.0) for x in both]]
    stores[0].set("here", "yes")
    assert stores[1].get("here") == b"yes"


def test_a_rank_that_is_there_twice_is_named(rank_0):
    given = __main__.job()._replace(ranks=3)
    with ThreadPoolExecutor() as pool:
        ranks = given, *[given._replace(rank=1, local_rank=1)] * 2
        found = [result.exception() for result in [pool.submit(meeting.met, x, 2.0) for x in ranks]]
    assert sum("RANK of its own, got two with 1" in str(x) for x in found) == 1
    assert sum("of which rank 2 did not come within 2 seconds" in str(x) for x in found) == 2


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@pytest.mark.parametrize(
    "name, value", [(GLOO, "nope0"), (GLOO, "eth"), (GLOO, "lo,nope0"), (NCCL, "=nope0")]
)
def test_an_interface_that_is_not_there_is_named(name, value, monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    says = f"{name} must name network interfaces of this machine, lo, eth0, got {value}: unset"
    with pytest.raises(ValueError, match=says):
        meeting.expect_interfaces(name, value)
    for right in ("", "lo", "eth0,lo"):
        meeting.expect_interfaces(name, right)
    for right in ("^docker", "eth", "=eth0", "nope,eth"):
        meeting.expect_interfaces(NCCL, right)


@pytest.mark.parametrize("gpus", [0, 2])
def test_the_interfaces_are_those_of_the_backend(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    used, other = (NCCL, GLOO) if gpus else (GLOO, NCCL)
    for name, value in {**OF_TORCHRUN, other: "nope0"}.items():
        monkeypatch.setenv(name, value)
    __main__.expect_network(__main__.job())
    monkeypatch.setenv(used, "nope0")
    with pytest.raises(ValueError, match=used):
        __main__.expect_network(__main__.job())
    with pytest.raises(ValueError, match=used):  # of one process, too
        __main__.expect_network(__main__.Job())


def test_a_rank_that_does_not_answer_is_named():
    said = run_script("tests/helpers/silent_rank.py", ranks=2, code=1)
    assert (
        "FAILED: expected an answer of all 2 ranks within 120 seconds, and rank 1 does not" in said
    )


def test_a_rank_that_ends_during_the_check_is_named():
    said = run_script("tests/helpers/ended_rank.py", ranks=2, code=1)
    says = "FAILED: expected an answer of all 2 ranks, and rank 1 does not answer rank 0, because"
    assert says in said and "Traceback" not in said


@pytest.mark.parametrize("arguments", [[], ["plan", "--tokens", "8", "--vocab", "8"]])
def test_a_reader_may_end_before_the_output(arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tp_headloss", *arguments]
    # which writes at once, so that nothing is left for the end
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=buffered
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "closed"),
    [("", ">&-"), ("", "2>&-"), ("plan --tokens 8 --vocab 8", ">&- 2>&-")],
)
def test_a_closed_output_changes_no_result(arguments, closed):
    command = f"{sys.executable} -m tp_headloss {arguments} {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert (done.stdout == "") == (closed != "2>&-")


LAUNCHED = [
    ("SLURM_STEP_NUM_TASKS", "Slurm", "srun"),
    ("OMPI_COMM_WORLD_SIZE", "Open MPI", "mpirun"),
    ("PMI_SIZE", "MPI", "mpirun"),
]


@pytest.mark.parametrize("name, launcher, command", LAUNCHED)
@pytest.mark.parametrize("tasks, warns", [("16", True), ("1", False), ("", False)])
def test_separate_checks_are_warned_of(tasks, warns, name, launcher, command, monkeypatch, capsys):
    for other, *_ in LAUNCHED:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, tasks)
    __main__.warn_of_separate_checks(__main__.Job())
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {launcher} started 16 processes, and each checks") == warns
    assert (f"have {command} start one torchrun" in said) == warns
    __main__.warn_of_separate_checks(__main__.Job(2, 0, 0, 2, "localhost", 29500))
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("WORLD_SIZE", "1")  # which the warning would call missing
    __main__.warn_of_separate_checks(__main__.Job())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("value", "code"), [("true", 2), ("0", None)])
def test_a_word_that_triton_alone_takes_for_1_is_refused(value, code, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", value)
    monkeypatch.setattr(sys, "argv", ["tp_headloss"])
    monkeypatch.setattr(__main__, "report_of_job", lambda job: ([], True))
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == (code or 0)
    assert ("TRITON_INTERPRET must be 1, or not set, got true" in capsys.readouterr().err) == bool(
        code
    )


WRONG = [(name, value) for name in OF_TORCHRUN for value in ("", "two", "-1", "2147483648")]


@pytest.mark.parametrize(
    ("name", "value"), [case for case in WRONG if case[0] != "MASTER_ADDR"] + [("MASTER_ADDR", "")]
)
def test_a_variable_that_is_missing_or_wrong_is_named(name, value, monkeypatch, capsys):
    for key, right in OF_TORCHRUN.items():
        monkeypatch.setenv(key, right)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["tp_headloss"])
    with pytest.raises(SystemExit) as exit:
        __main__.main()
    said = capsys.readouterr().err
    assert exit.value.code == 2 and f"error: {name} must be " in said
    assert f"got {value or 'nothing'}: write torchrun " in said and "unset WORLD_SIZE" in said


def test_a_full_disk_is_no_wrong_result():
    command = [sys.executable, "-m", "tp_headloss", "plan", "--tokens", "4", "--vocab", "8"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert result.returncode == 2
    assert result.stderr.startswith("the report could not be written: [Errno 28]")


def test_ranks_that_do_not_come_are_waited_for_in_plain_sight(rank_0, monkeypatch, capsys):
    port = os.environ["MASTER_PORT"]
    monkeypatch.setattr(__main__, "WAIT", timedelta(seconds=1))
    meeting = f"2 ranks at localhost:{port}"
    says = f"^FAILED: expected {meeting}, of which rank 1 did not come within 1 seconds\n.*unset WORLD_SIZE"
    with pytest.raises(SystemExit, match=says):
        __main__.join(__main__.job(), "gloo")
    assert capsys.readouterr().out.startswith(f"waiting for {meeting}; to check one process, unset")


@pytest.mark.parametrize(
    "wrong", [lambda x: x * 1.001, lambda x: x * torch.nan], ids=["value", "nan"]
)
def test_a_wrong_loss_fails_the_check(wrong, monkeypatch):
    def forward(self, *args, **kwargs):
        out = right(self, *args, **kwargs)
        return out._replace(loss=wrong(out.loss))

    right = HeadLoss.forward
    monkeypatch.setattr(HeadLoss, "forward", forward)
    lines, passed = __main__.report([torch.device("cpu")], None)
    assert not passed and any(line.startswith("FAILED: cpu: cross-entropy") for line in lines)


def test_a_check_that_raises_is_reported(monkeypatch):
    monkeypatch.setattr(HeadLoss, "linear", lambda *_, **__: 1 / 0)
    lines, passed = __main__.report([torch.device("cpu")], None)
    assert not passed and any("FAILED: cpu: ZeroDivisionError" in line for line in lines)


def test_the_oldest_versions_are_those_that_are_declared():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for name, oldest in __main__.NEEDED.items():
        assert f"{name}>={oldest}" in config["options"]["install_requires"]


def set_up(of_image: str, tmp_path) -> str:
    """What the check says in an image whose sitecustomize runs this line."""
    (tmp_path / "sitecustomize.py").write_text(f"import torch; {of_image}\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tp_headloss"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_settings_of_an_image_are_named_and_not_blamed_on_the_machine(tmp_path):
    said = set_up(
        "torch.set_grad_enabled(False); torch.set_default_device('meta'); "
        "torch.set_default_dtype(torch.bfloat16); torch.autocast('cpu').__enter__(); "
        "torch.set_float32_matmul_precision('high')",
        tmp_path,
    )
    assert (
        "warning: this process starts with gradients off, autocast on for cpu, default device meta, "
        "default dtype torch.bfloat16, float32 matmul precision high, maybe of a sitecustomize.py"
    ) in said


@pytest.fixture
def before():
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_float32_matmul_precision("highest")


SETTINGS = {
    "gradients off": lambda: torch.set_grad_enabled(False),
    "default device meta": lambda: torch.set_default_device("meta"),
    "default dtype torch.float64": lambda: torch.set_default_dtype(torch.float64),
    "float32 matmul precision medium": lambda: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_named_and_is_as_before_afterwards(name, before):
    SETTINGS[name]()
    lines, passed = __main__.report([torch.device("cpu")], None)
    assert passed and lines[-1].startswith(f"warning: this process starts with {name}, maybe")
    assert __main__.changed_settings() == [name]


@pytest.mark.parametrize(
    "name, within",
    [
        ("inference mode on", torch.inference_mode),
        ("autocast on for cpu", lambda: torch.autocast("cpu", torch.bfloat16)),
    ],
)
def test_a_mode_of_torch_is_named(name, within):
    with within():
        lines, passed = __main__.report([torch.device("cpu")], None)
    assert passed and lines[-1].startswith(f"warning: this process starts with {name}, maybe")


def test_no_setting_is_named_where_none_is_changed():
    assert not any("warning" in line for line in __main__.report([torch.device("cpu")], None)[0])
