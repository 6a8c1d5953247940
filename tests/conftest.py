"""Device and backends under test: CUDA where there is one, else the CPU with interpreted
kernels."""

import collections
import gc
import os

import pytest
import torch
from interpreter import patch_interpreter
from ranks import seed

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported anywhere
    patch_interpreter()
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
torch.manual_seed(0)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    return request.param


@pytest.fixture
def options(backend):
    from tp_headloss import Options  # not before the interpreter was chosen

    return Options(backend=backend)


@pytest.fixture(autouse=True)
def _seed(request, record_property):
    """And, for reports, how many ranks a test has."""
    callspec = getattr(request.node, "callspec", None)
    record_property("world_size", callspec.params.get("world_size", 1) if callspec else 1)
    seed(sum(map(ord, request.node.name)))


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU; not collected elsewhere")
    config.addinivalue_line(
        "markers", "interpreted: of the Triton backend alone, which on CPUs is interpreted"
    )
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")


# Long files, those that take most time of a processor first, so that no worker is left alone with
# one of them.
LONG = [
    "test_structure", "test_hosts_gpu", "test_trainers", "test_generated", "test_training",
    "test_compile", "test_wrapping", "test_transformers", "test_megatron", "test_topk_distillation",
    "test_verl_engine", "test_distill_launch", "test_late_gradient", "test_bad_inputs",
    "test_accuracy", "test_deepspeed", "test_faults", "test_sampling", "test_torchtitan",
    "test_row_function_generated", "test_reduction", "test_module", "test_nemo_automodel",
    "test_sharding", "test_at_ids_beside", "test_grpo", "test_autograd", "test_bad_inputs_triton",
    "test_teacher_head", "test_package", "test_bench", "test_examples", "test_epilogue",
    "test_plan", "test_export", "test_prepared",
]  # fmt: skip


def pytest_addoption(parser):
    parser.addoption(
        "--all-interpreted",
        action="store_true",
        help="on CPUs, too, all tests of the Triton backend",
    )


def redundant(items):
    """Those of one test's items that repeat what the others have: few of them have each value of
    each parameter, the one with most that are missing chosen first."""
    values = [set(enumerate(item.callspec._idlist)) for item in items]  # the ids of its parameters
    missing, chosen = set().union(*values), set()
    while missing:
        most = max(range(len(items)), key=lambda i: len(values[i] & missing))
        chosen.add(most)
        missing -= values[most]
    return [item for i, item in enumerate(items) if i not in chosen]


def pytest_collection_finish(session):
    gc.freeze()  # modules and thousands of tests, so that no collection of garbage looks through them


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    if DEVICE == "cpu" and not config.getoption("--all-interpreted"):
        # the interpreter is slow, and the same kernels run for each product of a test's parameters
        interpreted = collections.defaultdict(list)
        for item in items:
            callspec = getattr(item, "callspec", None)
            if callspec and (
                callspec.params.get("backend") == "triton" or item.get_closest_marker("interpreted")
            ):
                interpreted[item.path, item.originalname].append(item)
        left_out = {item for group in interpreted.values() for item in redundant(group)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if DEVICE == "cpu":  # nothing to run there: deselected, so that no skip hides in the report
        gpu = [item for item in items if item.get_closest_marker("cuda")]
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]
