"""The records that kernels and families' device functions pass to each other.

Names: x raw logit, z transformed logit, v the same without the target, m maximum, a the student's
scale where it meets a teacher, T tokens. A field that a call does not need is 0, because Triton
cannot return None.
"""

from typing import Any, NamedTuple


class Inputs(NamedTuple):
    """Tensors, in the order of `request.Tensors`, and numbers that the kernels read besides packets
    and merged rows.

    None switches a part off.
    """

    x: Any = None  # [T, width] logits
    labels: Any = None  # [T] int32 or int64
    bias: Any = None  # [width]
    temperature: Any = None  # [T] fp32
    column_weight: Any = None  # [width] fp32
    teacher: Any = None  # [T, width] logits
    scales: Any = None  # [2, T] fp32 of teacher and student, instead of their numbers
    entries: Any = None  # [T, E] int32 ids of a top-K teacher, ascending
    entry_log_probs: Any = None  # [T, E] fp32
    sets: Any = None  # [all] int32 ids of all tokens' sets, each of which ascends
    set_spans: Any = None  # [T, 2] int64 bounds of a token's set among them
    label_logits: Any = None  # [T] fp32 z of the labels, whatever shard has them
    # [T, K] int32, in any order and more than once: those whose log-probs are asked for
    ids: Any = None
    x_row: Any = None  # strides
    x_column: Any = None
    teacher_row: Any = None
    teacher_column: Any = None
    n_entries: Any = None
    n_ids: Any = None
    width: Any = None
    chunk_size: Any = None
    pre: Any = None  # factor before the softcap, None: 1
    post: Any = None  # factor after it, None: no softcap
    teacher_scale: Any = None  # both None: nothing is scaled
    student_scale: Any = None
    beta: Any = None  # the teacher's share of the Jensen-Shannon mixture


class Chunk(NamedTuple):
    """One chunk of one row."""

    row: object
    first: object  # first column
    size: object  # valid columns, 0 for an ignored token
    start: object  # vocabulary id of the shard's first column
    target: object  # column of the label relative to `first`, -1 if it is elsewhere
    owned: object  # whether it is here
    ignored: object
    pre: object
    post: object
    teacher_scale: object
    student_scale: object


class Tile(NamedTuple):
    """Some columns of a row."""

    z: object  # transformed logits, -inf outside
    v: object  # the same without the target
    u: object  # the teacher's scaled logits, or 0
    columns: object
    offset: object  # of the tile in the chunk
    partial: object  # whether only some of its columns exist


class SoftmaxTile(NamedTuple):
    """The softmax of a tile."""

    before: object  # maximum before this tile
    peak: object  # maximum of its v
    shifted: object  # v - maximum
    p: object  # exp of that


class Move(NamedTuple):
    """A maximum that moves."""

    before: object
    drop: object  # before - after, 0 at the beginning
    factor: object  # exp of that, 0 at the beginning
    sum: object  # the lane sums of p before


class Core(NamedTuple):
    """The finished softmax of a chunk."""

    max: object
    sum: object  # [BLOCK] lane sums


class Packet(NamedTuple):
    """One packet of BLOCK tokens."""

    at: object  # pointer to its first row
    n: object  # elements between rows
    here: object  # mask of the tokens that exist


class PacketSoftmax(NamedTuple):
    """The softmax of a packet."""

    max: object
    peak: object  # maximum of all packets
    drop: object
    factor: object
    sum: object
    student_factor: object  # exp(a drop), 0 if nobody needs it
    owner: object  # 0 without labels
    scale: object  # a


class Joined(NamedTuple):
    """The merged softmax of BLOCK tokens with the target column, in float64; drop .. at_target are
    0 without labels."""

    shift: object  # maximum of all columns but the target
    top: object  # maximum of all columns
    drop: object  # shift - top
    factor: object
    target: object
    offset: object  # target - top
    p_target: object
    student_factor: object
    at_target: object  # exp(a offset)
    others: object  # sum without the target, relative to shift
    whole: object  # sum of all columns, relative to top
    log_sum: object
    student_sum: object
    scale: object
    bad: object
    ignored: object
    token: object  # numbers of the tokens
    here: object  # mask of those that exist
    n: object  # elements between rows


class Outputs(NamedTuple):
    """Tensors that the merge writes."""

    merged: object  # [R, T] fp32
    value: object  # [K, T] fp32
    valid: object  # [T] bool, or None
    argmax: object  # [T] int64, or None
    hits: object  # [T] bool, or None


class LossGradient(NamedTuple):
    """Factors of a reduced loss's gradient for its statistics: each is coefficient * weight *
    upstream * inverse."""

    upstream: object = None  # pointer to the gradient of the loss, fp32; None without a loss
    # pointer to 1 / what the loss was divided by, fp64; a division in each tile is slow
    inverse: object = None
    weight: object = None  # token weights [T] fp32, or None


class Lists(NamedTuple):
    """Something of each list of ids of `Inputs`."""

    ids: object = None
    sets: object = None
    entries: object = None


class Places(NamedTuple):
    """Some of a row's ids in one list, at which the gradient is computed apart."""

    ids: object  # pointer to those of all rows
    exact: object  # pointer to the gradient there
    begin: object  # number of the first
    count: object


class Token(NamedTuple):
    """One row of a gradient."""

    row: object
    n: object
    merged: object  # pointer to the token's first merged row
    whole: object  # S
    ignored: object
    student_scale: object
    # `Lists`: [BLOCK] of the ids in a tile of a list, in this one; else some one number
    places: object
    start: object  # vocabulary id of the shard's first column
    written: object  # mask of the columns that exist
    readable: object  # mask of those that are read: none of an ignored row
    loss: object  # `loss_of_row`
