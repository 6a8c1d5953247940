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
    if not os.environ.get("TP_HEADLOSS_FULL"):
        # Inductor writes loops without vectors, which take a C++ compiler half of the time.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
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
    config.addinivalue_line(
        "markers",
        "interpreted_only(name=values): parameters with which the Triton backend runs on CPUs; the"
        " other values take the same way through the kernels",
    )
    config.addinivalue_line(
        "markers",
        "each_argument: on CPUs the Triton backend meets each value of each argument, also of"
        " arguments that are listed together",
    )
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")


# Long files, those that take most time of a processor first, so that no worker is left alone with
# one of them.
LONG = [
    "test_structure", "test_training", "test_trainers", "test_transformers", "test_fp8",
    "test_megatron", "test_registration_ids", "test_registration", "test_report", "test_compile",
    "test_ways", "test_topk_distillation", "test_verl_engine", "test_distill_launch",
    "test_hosts_gpu", "test_accuracy", "test_generated", "test_torchtitan", "test_late_gradient",
    "test_bad_inputs", "test_draft_heads", "test_hub", "test_axolotl", "test_deepspeed",
    "test_wrapping", "test_faults", "test_sampling", "test_spec",
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


def values_of(item):
    """The values of a test's parameters, those that are listed together as one."""
    if item.get_closest_marker("each_argument") is not None:
        return {(name, str(value)) for name, value in item.callspec.params.items()}
    return set(enumerate(item.callspec._idlist))


def redundant(items):
    """Those of one test's items that repeat what the others have: few of them have each value of
    each parameter, the one with most that are missing chosen first."""
    values = [values_of(item) for item in items]
    missing, chosen = set().union(*values), set()
    while missing:
        most = max(range(len(items)), key=lambda i: len(values[i] & missing))
        chosen.add(most)
        missing -= values[most]
    return [item for i, item in enumerate(items) if i not in chosen]


def is_interpreted(item):
    """Whether a test has parameters and its kernels run through the interpreter on CPUs."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and (
        callspec.params.get("backend") == "triton"
        or item.get_closest_marker("interpreted") is not None
    )


def is_marked_out(item):
    """Whether a parameter has none of the values that `interpreted_only` lists."""
    marker = item.get_closest_marker("interpreted_only")
    listed = {} if marker is None else marker.kwargs
    return any(item.callspec.params[name] not in values for name, values in listed.items())


def pytest_collection_finish(session):
    gc.freeze()  # modules and thousands of tests, so that no collection of garbage looks through them


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    if DEVICE == "cpu" and not config.getoption("--all-interpreted"):
        # the interpreter is slow, and the same kernels run for each product of a test's parameters
        left_out = {item for item in items if is_interpreted(item) and is_marked_out(item)}
        interpreted = collections.defaultdict(list)
        for item in items:
            if is_interpreted(item) and item not in left_out:
                interpreted[item.path, item.originalname].append(item)
        left_out.update(item for group in interpreted.values() for item in redundant(group))
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if DEVICE == "cpu":  # nothing to run there: deselected, so that no skip hides in the report
        gpu = [item for item in items if item.get_closest_marker("cuda")]
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]
