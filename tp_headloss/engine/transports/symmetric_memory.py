"""The transport "symm_mem": packets in memory that all GPUs of a group address."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path

import torch

from ...ranks.comm import NumberedStore, gather_objects
from ...ranks.groups import is_live_group, resolve_process_group
from ..backend import load_backend
from ..one_read.kernel import Memory, stream_after
from ..request import Request
from .transport import Transport

FASTER_FROM = (9, 0)  # the compute capability of GPUs where it was faster

_log = logging.getLogger("tp_headloss")


class SymmetricMemory(Transport):
    """Memory of one group that all its GPUs address: two slots of packets per rank, used in turn.

    Two slots and one barrier per exchange suffice: a rank that writes a slot again has passed the
    barrier of the exchange in between, which its peers reach only after they have read the slot.
    Whose turn it is lives on the device (`turns`), because a captured graph is replayed with the
    arguments of its capture.
    """

    def __init__(self, numel: int, device: torch.device):
        import torch.distributed._symmetric_memory as symm_mem

        self.slot = 1 << (numel - 1).bit_length()  # fp32 numbers
        self.buffer = symm_mem.empty(2 * self.slot, dtype=torch.float32, device=device)
        self.buffer.zero_()
        # stays True if an exchange fails on this rank: its turns are no longer its peers'
        self.in_exchange = False

    def join(self, group, store: NumberedStore):
        """Exchange the addresses of the buffers between the group's ranks."""
        import torch.distributed._symmetric_memory as symm_mem

        device = self.buffer.device
        with store.in_place_of_store(group, device):
            self.handle = symm_mem.rendezvous(self.buffer, group)
        # a peer that does not come for so long is a CUDA error: the group's timeout, or else NCCL's
        # default
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        self.timeout_ms = (
            600_000 if timeout is None else max(1, round(timeout.total_seconds() * 1000))
        )
        addresses = [
            self.handle.get_buffer(r, (1,), torch.float32).data_ptr() for r in range(group.size())
        ]
        self.peers = torch.tensor(addresses, device=device)  # [P] int64
        self.addresses = addresses
        # [0]: exchanges completed, read where packets are written; [1]: the same, read where they
        # are merged
        self.turns = torch.zeros(2, dtype=torch.int32, device=device)
        self.stream = torch.cuda.current_stream(device)
        torch.cuda.synchronize(device)  # once per group: other streams may use it next

    def serve_one_read(self, group):
        """Hold packets of launches of `one_read`."""
        self.one_read = Memory(self.buffer, self.addresses, group.rank(), self.timeout_ms)

    def write(self, request: Request, launches=None) -> torch.Tensor:
        """Write this rank's packets [chunks, rows, N] into the slot whose turn it is; the result is
        the first slot."""
        self._take_turns()
        shape = request.packets_shape
        packets = self.buffer[: shape[0] * shape[1] * shape[2]].view(shape)
        self.in_exchange = True
        launches = launches or load_backend(request.facts.backend)
        launches.local_statistics(packets, request, self)
        return packets

    def merge(self, packets: torch.Tensor, request: Request, launches=None) -> list[torch.Tensor]:
        """Merge the packets in all ranks' slots, after a barrier."""
        self.handle.barrier(channel=0, timeout_ms=self.timeout_ms)
        launches = launches or load_backend(request.facts.backend)
        outputs = launches.merge_packets(packets, request, self)
        self.in_exchange = False
        return outputs

    def _take_turns(self):
        """Let exchanges on several streams take turns, in the order of the calls."""
        self.stream = stream_after(self.stream, self.buffer.device)


class _Group:
    """Symmetric memory of a group so far, all of it, because graphs may hold the oldest; or the
    obstacle to it."""

    def __init__(self, name: str, group):
        self.name, self.group, self.capability = name, group, (0, 0)
        self.obstacle: str | None = None
        # by whether it is for `one_read`; None: there is none for it
        self.memories: dict[bool, list[SymmetricMemory] | None] = {}
        self.is_told = False

    @functools.cached_property
    def store(self) -> NumberedStore:
        return NumberedStore(self.group)

    def tell(self):
        """Warn, once, that there is an obstacle."""
        if not self.is_told:
            _log.warning(
                "no symmetric memory for group %s, packets are gathered: %s",
                self.name,
                self.obstacle,
            )
        self.is_told = True

    def made_before(self, numel: int, of_one_read: bool) -> SymmetricMemory | None:
        """Return the newest memory if it has room for numel numbers."""
        memories = self.memories.get(of_one_read)
        if not memories or memories[-1].slot < numel:
            return None
        if memories[-1].in_exchange:
            raise RuntimeError(
                f"an earlier exchange of group {self.name} failed on this rank in the "
                "middle, so its ranks no longer agree about their symmetric memory: make a new "
                "process group, or use transport='gather'"
            )
        return memories[-1]

    def make(self, numel: int, device: torch.device) -> SymmetricMemory | None:
        """Make memory on all ranks. None, and there is an obstacle, if one of them has none."""
        made: list[SymmetricMemory] = []
        with torch.cuda.device(device):
            # apart, because a rank that has no memory must not leave the others waiting for it in
            # the rendezvous
            for step in (
                lambda: made.append(SymmetricMemory(numel, device)),
                lambda: made[0].join(self.group, self.store),
            ):
                self.obstacle = self.obstacle or _first_failure(step, self.group)
        return None if self.obstacle else made[0]

    def keep(self, memory: SymmetricMemory, of_one_read: bool) -> SymmetricMemory | None:
        """Keep memory for later calls. None if it is for one read, and a rank has no kernel."""
        if of_one_read:
            with torch.cuda.device(memory.buffer.device):
                reason = _first_failure(lambda: memory.serve_one_read(self.group), self.group)
            if reason:
                _log.warning(
                    "no launch that reads each logit once for group %s, two instead: %s",
                    self.name,
                    reason,
                )
                self.memories[of_one_read] = None
                return None
        self.memories[of_one_read] = [*(self.memories.get(of_one_read) or ()), memory]
        return memory


_groups: dict[str, _Group] = {}


def obstacle(group_name: str) -> str | None:
    """Return why a group has no symmetric memory, None if it has some."""
    known = _groups.get(group_name)
    return "no call has looked for it" if known is None else known.obstacle


def _group_of(name: str, device: torch.device) -> _Group | None:
    """Return what is known of a group, after its ranks have agreed when it is first seen; None:
    they cannot now."""
    group, known = resolve_process_group(name), _groups.get(name)
    if known is not None and known.group is group:
        return known
    if torch.cuda.is_current_stream_capturing():
        return None
    gone = [other for other, known in _groups.items() if not is_live_group(known.group, other)]
    for other in gone:
        del _groups[other]  # and the memory of a group that was destroyed
    known = _groups[name] = _Group(name, group)
    known.obstacle, known.capability = _obstacle_and_capability(group, device)
    return known


def find_symmetric_memory(
    request: Request, numel: int | None = None, of_one_read: bool = False
) -> SymmetricMemory | None:
    """Return memory for a request's packets under "symm_mem" and "auto", or None: gather them.
    of_one_read: memory for packets of `one_read`, of which a slot has numel fp32 numbers.

    The ranks agree when a group is first seen, before any exchange, and again when more tokens need
    more memory; both are host synchronisations, and neither is possible while a CUDA graph is being
    captured (run a step before). "auto" takes symmetric memory only on GPUs like those where it was
    faster. It warns only where memory could not be made for a group without an obstacle.
    """
    facts, logits = request.facts, request.tensors.logits
    if facts.world_size == 1 or not load_backend(facts.backend).shares_memory(logits):
        return None
    known = _group_of(facts.group_name, logits.device)
    if known is None:
        return None
    if known.obstacle and facts.transport == "symm_mem":
        known.tell()
    if known.obstacle or (facts.transport == "auto" and known.capability < FASTER_FROM):
        return None
    numel = math.prod(request.packets_shape) if numel is None else numel
    found = known.made_before(numel, of_one_read)
    has_none = of_one_read in known.memories and known.memories[of_one_read] is None
    if found is not None or has_none or torch.cuda.is_current_stream_capturing():
        return found
    made = known.make(numel, logits.device)
    if made is None:
        known.tell()
        return None
    return known.keep(made, of_one_read)


def _first_failure(step, group) -> str | None:
    """Run a step on every rank, and return the first rank's error, the same on all ranks; None if
    there is none."""
    error = None
    try:
        step()
    except Exception as exception:
        error = f"{type(exception).__name__}: {exception}"
    return next((e for e in gather_objects(error, group) if e), None)


def _obstacle_and_capability(group, device) -> tuple[str | None, tuple[int, int]]:
    """Reason why there is no symmetric memory, or None, and the lowest compute capability: equal on
    all ranks."""
    try:
        import torch.distributed._symmetric_memory

        host = Path("/proc/sys/kernel/random/boot_id").read_text()
        missing = None if torch.version.hip is None else "its kernels were never run on AMD's GPUs"
    except (ImportError, OSError) as error:
        host, missing = None, str(error)
    with torch.cuda.device(device):
        facts = gather_objects((host, missing, torch.cuda.get_device_capability(device)), group)
    lowest = min(capability for *_, capability in facts)
    if reasons := [reason for _, reason, _ in facts if reason]:
        return reasons[0], lowest
    return None if len(
        {host for host, *_ in facts}
    ) == 1 else "the group spans several hosts", lowest
