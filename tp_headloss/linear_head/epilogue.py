"""Which calls of a linear head can have their statistics and gradient as epilogues of the GEMM."""

import torch

from ..arguments.linear import Linear
from ..engine.backend import compute_capability
from ..engine.request import Request

CAPABILITY = (9, 0)  # of the oldest GPUs whose tensor memory accelerator loads the tiles
# capabilities on which scripts/bench/linear_turns.py compared them with blocks
MEASURED = ((9, 0),)


def is_default(device: torch.device) -> bool:
    """True where calls with rounded logits have epilogues if they can: where these were compared
    with blocks."""
    return device.type == "cuda" and compute_capability(device) in MEASURED


def has_wide_rows(weight: torch.Tensor) -> bool:
    """Whether a weight's rows are contiguous, and begin at multiples of 16 bytes from its first
    one."""
    return weight.stride(1) == 1 and weight.stride(0) * weight.dtype.itemsize % 16 == 0


NOT_MEASURED = "they were not compared with blocks of logits on such a device"


def obstacle(hidden, weight, dtype: torch.dtype, request: Request, linear: Linear) -> str | None:
    """Reason why recompute needs blocks of logits, or None. dtype: of the GEMMs' operands."""
    if linear.exact_logits and (linear.mode == "one_sweep" or linear.gradients is not None):
        return "epilogues are for recompute"
    if not linear.exact_logits and not is_default(hidden.device):
        return NOT_MEASURED
    if request.facts.backend != "triton":
        return "the torch backend has no kernels"
    return _obstacle_to_statistics(request) or _obstacle_to_operands(hidden, weight, dtype)


def _obstacle_to_statistics(request: Request) -> str | None:
    """Reason why what is asked of the logits needs them in memory."""
    if request.layout.needs_label_logits:
        return "ranks are counted in blocks of logits"
    if request.tensors.sets is not None or request.layout.per_id:
        return "ids of sets are picked from blocks of logits"
    teacher = request.teacher_head.teacher_hidden, request.tensors.teacher, request.tensors.entries
    if any(x is not None for x in teacher):
        return "a teacher is compared with blocks of logits"
    return None


def _obstacle_to_operands(hidden, weight, dtype: torch.dtype) -> str | None:
    """Reason why the kernel cannot read the operands as they are."""
    if hidden.is_cuda and compute_capability(hidden.device) < CAPABILITY:
        return f"the GPU's compute capability is less than {CAPABILITY[0]}.{CAPABILITY[1]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the operands are neither bfloat16 nor float16 but {dtype}"
    if not torch.compiler.is_compiling() and (hidden.is_neg() or weight.is_neg()):
        return "the sign of an operand is not in memory"  # operators of torch.compile get copies
    row_bytes = weight.shape[1] * dtype.itemsize
    if row_bytes == 0 or row_bytes % 16 or not has_wide_rows(weight):
        return "rows of the weight are not contiguous multiples of 16 bytes"
    return None
