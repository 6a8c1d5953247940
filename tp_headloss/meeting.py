"""The ranks of the self-check: which of them this process is, and where they meet.

Rank 0 serves the store in which ranks meet, or torchrun does. Variables that cannot be right are
refused at once, because torch would wait for minutes.
"""

import contextlib
import os
import socket
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

OF_A_RANK = "RANK", "LOCAL_RANK"
MOST_PORT = 2**16 - 1
START = (
    "write torchrun --standalone --nproc-per-node N -m tp_headloss, or unset WORLD_SIZE, "
    f"{' and '.join(OF_A_RANK)} to check one process"
)
# of an attempt to connect, and between two of them
ATTEMPT = 5.0  # seconds
PAUSE = 0.2  # seconds
LINGER = 2.0  # seconds
SIZE_OF_RANK = "tp_headloss/WORLD_SIZE of rank "  # in the store
MOST_NAMED = 8  # ranks in an error


class Job(NamedTuple):
    """The ranks of a check, and which of them this process is."""

    ranks: int = 1
    rank: int = 0
    local_rank: int = 0
    local_ranks: int = 1  # on this host
    host: str = ""  # where they meet
    port: int = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def has_store(self) -> bool:
        """Whether this process serves the store in which the ranks meet. Under torchrun, its agent
        does."""
        return self.ranks > 1 and self.rank == 0 and not agent_has_store()


def agent_has_store() -> bool:
    """Whether torchrun's agent serves the store, and no rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def job() -> Job:
    """Return what torchrun's variables say; ValueError that names one which is missing or wrong."""
    of_a_rank = [name for name in OF_A_RANK if name in os.environ]
    if "WORLD_SIZE" not in os.environ and not of_a_rank:
        return Job()
    ranks = number_of("WORLD_SIZE", 1, 2**31 - 1)
    if ranks == 1:
        for name in of_a_rank:
            number_of(name, 0, 0)
        # One rank checks itself alone, but a process group of one rank would read both.
        if "MASTER_ADDR" in os.environ:
            expect_address(os.environ["MASTER_ADDR"])
        if "MASTER_PORT" in os.environ:
            number_of("MASTER_PORT", 1, MOST_PORT)
        return Job()
    host = os.environ.get("MASTER_ADDR")
    if not host:
        raise ValueError(f"MASTER_ADDR must be the host of rank 0, got nothing: {START}")
    local_ranks = ranks
    if "LOCAL_WORLD_SIZE" in os.environ:
        local_ranks = number_of("LOCAL_WORLD_SIZE", 1, ranks)
    return Job(
        ranks,
        rank=number_of("RANK", 0, ranks - 1),
        local_rank=number_of("LOCAL_RANK", 0, local_ranks - 1),
        local_ranks=local_ranks,
        host=host,
        port=number_of("MASTER_PORT", 1, MOST_PORT),
    )


def number_of(name: str, least: int, most: int) -> int:
    """Return the number in a variable of the environment; ValueError unless it is in the range."""
    text = os.environ.get(name, "")
    if text.isdecimal() and least <= int(text) <= most:
        return int(text)
    expected = f"a whole number from {least} to {most}" if least < most else f"{least} of one rank"
    raise ValueError(f"{name} must be {expected}, got {text or 'nothing'}: {START}")


def uses_gpus(given: Job) -> bool:
    """Whether each rank of this host has a GPU of its own."""
    return torch.cuda.device_count() >= given.local_ranks


def expect_network(given: Job) -> None:
    """Raise ValueError for variables that name a host or an interface which is not there, or as the
    host of rank 0 another machine than rank 0's: torch would look for it for minutes."""
    if given.ranks > 1:
        expect_address(given.host)
    if given.has_store and not (is_of_this_machine(given.host) or is_forwarded(given)):
        raise ValueError(
            f"MASTER_ADDR must be the host of rank 0, got {given.host}, which is no address of "
            "this machine, where rank 0 runs"
        )
    name = "NCCL_SOCKET_IFNAME" if uses_gpus(given) else "GLOO_SOCKET_IFNAME"
    expect_interfaces(name, os.environ.get(name, ""))


def expect_address(host: str) -> None:
    """Raise ValueError unless a host has an address here."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR must be the host of rank 0, got {host or 'nothing'}, which has no address "
            f"here: {error}"
        ) from None


def is_of_this_machine(host: str) -> bool:
    """Whether a host has an address that a socket of this machine can have."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
            return True
    return False


def is_forwarded(given: Job) -> bool:
    """Whether connections to the meeting's address end at this machine all the same, as those to a
    service of a cluster do, whose address no machine has."""
    with contextlib.suppress(OSError), socket.create_server(("", given.port)) as server:
        server.settimeout(ATTEMPT)
        with socket.create_connection((given.host, given.port), timeout=ATTEMPT):
            server.accept()[0].close()  # a proxy may have answered in the place of a machine
            return True
    return False


def expect_store(given: Job, seconds: float) -> None:
    """Return when somebody listens at the meeting's address; TimeoutError after so many seconds.

    torch's own client begins its wait anew when the time is over.
    """
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            address = given.host, given.port
            socket.create_connection(address, timeout=max(min(left, ATTEMPT), PAUSE)).close()
            return
        except OSError as error:
            if left <= PAUSE:
                raise TimeoutError(
                    f"expected rank 0 at {given.address}, where nobody listens after "
                    f"{seconds:g} seconds: {error}"
                ) from None
        time.sleep(PAUSE)


def met(given: Job, seconds: float) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Return the store of a meeting where all ranks have come and expect equally many.

    Raises:
        TimeoutError: ranks that have not come after so many seconds.
        ValueError: ranks that were started with another WORLD_SIZE, for which torch waits without
            end.
    """
    wait = timedelta(seconds=seconds)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        given.host, given.port, is_master=given.has_store, timeout=wait, wait_for_workers=False
    )
    # of this start alone: the store of torchrun's agent outlives those that it repeats
    key = f"{SIZE_OF_RANK}{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')} "
    if store.add(f"{key}{given.rank} came", 1) > 1:
        raise ValueError(f"each process must have a RANK of its own, got two with {given.rank}")
    store.set(f"{key}{given.rank}", str(given.ranks))
    missing = {*range(given.ranks)}
    end = time.monotonic() + seconds
    while missing:
        for rank in sorted(missing):
            if not store.check([f"{key}{rank}"]):
                continue
            ranks = int(store.get(f"{key}{rank}"))
            if ranks != given.ranks:
                time.sleep(LINGER * given.has_store)  # others read from this process, too
                raise ValueError(
                    f"all ranks must have one WORLD_SIZE, got {given.ranks} on rank {given.rank} and "
                    f"{ranks} on rank {rank}"
                )
            missing.remove(rank)
        if missing and time.monotonic() > end:
            named = ", ".join(map(str, sorted(missing)[:MOST_NAMED]))
            more = f" and {len(missing) - MOST_NAMED} more" * (len(missing) > MOST_NAMED)
            raise TimeoutError(
                f"expected {given.ranks} ranks at {given.address}, of which rank {named}{more} did "
                f"not come within {seconds:g} seconds"
            )
        time.sleep(PAUSE * bool(missing))
    return store


def expect_interfaces(name: str, value: str) -> None:
    """Raise ValueError where a variable names interfaces of which this machine has none.

    For NCCL, "^eth" are all others, "=eth0" is this one, and "eth" are all that begin so.
    """
    there = [interface for _, interface in socket.if_nameindex()]
    names = [x for x in value.removeprefix("=").split(",") if x]
    if not names or value.startswith("^"):
        return
    if name == "GLOO_SOCKET_IFNAME":
        right = set(names) <= set(there)
    else:
        right = any(interface.startswith(tuple(names)) for interface in there)
    if not right:
        raise ValueError(
            f"{name} must name network interfaces of this machine, {', '.join(there)}, got {value}: "
            f"unset {name} to let torch choose"
        )
