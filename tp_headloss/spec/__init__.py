"""Names for annotations that say what an argument may be.

`checked` holds every call of a function to them.

``def reinforce(log_prob: LogProb, *, advantages: Advantages)`` says kind, shape and range of both.
Checks, refusals of wrong options, the inputs of a `HeadLoss`, the generated tests and the tables of
the reference read these lines. They read metadata and Python numbers, never a tensor's values.
Numbers are of Python or numpy; tensors where a line says so.
"""

import math
from typing import Annotated, Any, TypeAlias

import torch

from .checked import called_as as called_as
from .checked import checked as checked
from .checked import described as described
from .checked import lines_of as lines_of
from .checked import lines_within as lines_within
from .checks import FP32_MAX as FP32_MAX
from .lines import AnyOf as AnyOf
from .lines import Callables as Callables
from .lines import CheckedBy as CheckedBy
from .lines import Instance as Instance
from .lines import IntLine as IntLine
from .lines import Line as Line
from .lines import Names as Names
from .lines import NumberLine as NumberLine
from .lines import OneOf as OneOf
from .lines import Text as Text
from .lines import TupleOf as TupleOf
from .tensor_line import Sizes as Sizes
from .tensor_line import TensorLine as TensorLine
from .tensor_line import sizes_of as sizes_of

OF_NUMBERS = ": write torch.tensor(.., dtype=torch.float32), of tensors torch.stack(..)"
OF_TOKENS = f"{OF_NUMBERS}, in the shape of the tokens"
FLAG = OneOf((True, False))
MASK = TensorLine("bool")
LABELS = TensorLine("int64 or int32")
IDS = TensorLine("int64 or int32", None)
SCALAR = TensorLine("real numbers", (), hint=": one number, of a mask its .sum()")
TOKEN_WEIGHT = TensorLine("real numbers or bool", of_list=OF_NUMBERS)
TENSOR = TensorLine("real numbers or bool", None)
COLUMNS = TensorLine("real numbers or bool", None, sharded=-1)
TOKENS = TensorLine("floating point", of_list=OF_NUMBERS)
PER_TOKEN = TensorLine("real numbers", broadcasts=True, of_list=OF_NUMBERS)
# which does not broadcast
EACH_LABEL = ": a number for each label, in its shape, such as table[labels.clamp(min=0)]"
EACH_TOKEN = TensorLine("real numbers", hint=EACH_LABEL, per_token=EACH_LABEL)
NOT_SUMS = ": log-probs are per token, not summed over a sequence"
OF_LOGITS = ": of logits pass log_probs(logits, labels).log_prob"
# the trainer's logits in the place of another policy's would be silently wrong
OF_OTHER_LOGITS = ": of the logits of its own model pass log_probs(its_logits, labels).log_prob"
OF_ENGINE = (
    ": what the engine that sampled returned for each token, in the shape of the tokens; the "
    "trainer's log-probs in its place would correct nothing"
)


def _log_probs(hint: str, detached: bool = True) -> TensorLine:
    """Return the line of a log-prob per token."""
    return TensorLine(
        "floating point", detached=detached, hint=hint, of_list=OF_TOKENS, per_token=NOT_SUMS
    )


LOG_PROBS = _log_probs(OF_LOGITS, detached=False)
CONSTANT_LOG_PROBS = _log_probs(OF_LOGITS)
OTHER_LOG_PROBS = _log_probs(OF_OTHER_LOGITS, detached=False)
REFERENCE_LOG_PROBS = _log_probs(OF_OTHER_LOGITS)
GENERATOR_LOG_PROBS = _log_probs(OF_ENGINE)
TokenValues: TypeAlias = Annotated[torch.Tensor, TOKENS]
PerToken: TypeAlias = Annotated[torch.Tensor, PER_TOKEN]
ConstantValues: TypeAlias = Annotated[
    torch.Tensor, TensorLine("floating point", detached=True, of_list=OF_NUMBERS)
]
ConstantPerToken: TypeAlias = Annotated[
    torch.Tensor,
    TensorLine("real numbers", broadcasts=True, detached=True, of_list=OF_NUMBERS),
]
TokenLoss: TypeAlias = Annotated[
    torch.Tensor, "[..] fp32, loss per token, neither masked nor averaged"
]
TokenMask: TypeAlias = Annotated[torch.Tensor, MASK]
Logits: TypeAlias = Annotated[torch.Tensor, TensorLine("floating point", None, sharded=-1)]
# of an output layer's weight
Rows: TypeAlias = Annotated[torch.Tensor, TensorLine("floating point", None, sharded=0)]
Floating: TypeAlias = Annotated[torch.Tensor, TensorLine("floating point", None)]
Real: TypeAlias = Annotated[torch.Tensor, TensorLine("real numbers", None)]
Ids: TypeAlias = Annotated[torch.Tensor, IDS]
Labels: TypeAlias = Annotated[torch.Tensor, LABELS]
UNSHIFTED = TensorLine("int64 or int32", ("..", "S"))
UnshiftedLabels: TypeAlias = Annotated[torch.Tensor, UNSHIFTED]
TokenIds: TypeAlias = Annotated[torch.Tensor, TensorLine("int64 or int32", ("..", "K"))]
Scalar: TypeAlias = Annotated[torch.Tensor, SCALAR]
ClassWeight: TypeAlias = Annotated[torch.Tensor, TensorLine("real numbers", ("V",), constant=True)]

TINY = torch.finfo(torch.float32).tiny
LEAST = math.nextafter(0, 1)
BELOW_1 = math.nextafter(1, 0)
Share: TypeAlias = Annotated[float, NumberLine(0, 1, "in [0, 1]")]
AT_THE_ENDS = ": of jsd, whose end at 0 is Distillation(.., 'forward_kl'), and at 1 'reverse_kl'"
OpenShare: TypeAlias = Annotated[float, NumberLine(LEAST, BELOW_1, "in (0, 1)", AT_THE_ENDS)]
POSITIVE = NumberLine(LEAST, math.inf, "positive", in_fp32=True)
Positive: TypeAlias = Annotated[float, POSITIVE]
PositiveFp32: TypeAlias = Annotated[
    float, NumberLine(TINY, 1 / TINY, "positive and finite in fp32")
]
Finite: TypeAlias = Annotated[float, NumberLine(-1 / TINY, 1 / TINY, "finite in fp32")]
LogProb: TypeAlias = Annotated[float, NumberLine(-1 / TINY, 0, "a log-prob, at most 0 and finite")]
NotNegative: TypeAlias = Annotated[float, NumberLine(0, math.inf, "at least 0")]
NotNegativeFp32: TypeAlias = Annotated[
    float, NumberLine(0, FP32_MAX, "at least 0 and finite in fp32")
]
IN_FP32 = NumberLine(in_fp32=True)
Pair: TypeAlias = Annotated[tuple[float, float], TupleOf(IN_FP32, 2)]
PositivePair: TypeAlias = Annotated[tuple[float, float], TupleOf(POSITIVE, 2)]
# of an importance weight
WeightBounds: TypeAlias = Annotated[
    tuple[float, float], TupleOf(IN_FP32, 2, ordered=True, around=1.0)
]
Bounds: TypeAlias = Annotated[tuple[float, float], TupleOf(IN_FP32, 2, ordered=True)]
Count: TypeAlias = Annotated[int, IntLine(0)]
PER_ROW = ": one per row of tokens [B, S] is torch.tensor(..)[:, None].expand(B, S)"
GREEDY = ": for 0, which is greedy, SamplingRule(top_k=1) or argmax"
Temperature: TypeAlias = (
    Annotated[
        float,
        NumberLine(TINY, 1 / TINY, "positive and finite in fp32", GREEDY, of_pair=PER_ROW),
    ]
    | Annotated[torch.Tensor, TensorLine("real numbers", None, constant=True)]
)
ONE_ID = ": for 0, where one id has all probability, this id as a label of CrossEntropy"
TeacherTemperature: TypeAlias = (
    Annotated[
        float,
        NumberLine(TINY, 1 / TINY, "positive and finite in fp32", ONE_ID, of_pair=PER_ROW),
    ]
    | Annotated[torch.Tensor, TensorLine("real numbers", None, constant=True)]
)
IN_FUNCTION = "; a factor that is trained belongs into the function of a Term of your own"
OTHER_WEIGHTS = (
    ": one per class is CrossEntropy(class_weight=..), one per token is token_weight= of the call"
)
TERM_WEIGHT = TensorLine(
    "floating point", (), constant=True, hint=OTHER_WEIGHTS, trained=IN_FUNCTION
)
OF_SCHEDULE = (
    ": for a schedule pass a tensor, weight = torch.tensor(0.1), and after each backward "
    "weight.fill_(..)"
)
Weight: TypeAlias = (
    Annotated[
        float,
        NumberLine(-FP32_MAX, FP32_MAX, "finite in fp32", of_function=OF_SCHEDULE),
        "Factor of the term in the loss",
    ]
    | Annotated[torch.Tensor, TERM_WEIGHT]
)
OWN_TERM = ": a weight below 0 rewards what the term penalises; a Term of your own takes any"
# of a term that is never below 0, and has no least value if it is subtracted
PenaltyWeight: TypeAlias = (
    Annotated[
        float,
        NumberLine(0, FP32_MAX, "at least 0 and finite in fp32", OWN_TERM, of_function=OF_SCHEDULE),
        "Factor of the term in the loss; the sign of a tensor is not looked at",
    ]
    | Annotated[torch.Tensor, TERM_WEIGHT]
)
Size: TypeAlias = Annotated[int, IntLine(1)]
Unused: TypeAlias = Annotated[Any, CheckedBy("not used")]
Absent: TypeAlias = Annotated[Any, CheckedBy("None")]
TotalWeight: TypeAlias = Annotated[torch.Tensor, TensorLine("real numbers", ("width",), sharded=0)]
TokenWeight: TypeAlias = Annotated[torch.Tensor, TOKEN_WEIGHT]
BIAS = TensorLine(
    "floating point",
    ("width",),
    sharded=0,
    hint=": a temperature is temperature= of a Transform or of a teacher",
)
Bias: TypeAlias = Annotated[torch.Tensor, BIAS]
HIDDEN = TensorLine("floating point", ("..", "H"))
WEIGHT = TensorLine("floating point", ("width", "H"), sharded=0)
