"""What a rank believes of others: memory is opened only if it is that rank's, and nothing is unpickled."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import resource
import shlex
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import deep_ep
from deep_ep.errors import EPArgumentError, EPTransportError
from deep_ep.membership import rendezvous
from deep_ep.native import backend

opens_memory = pytest.mark.skipif(
    backend.get().name != "cpu", reason="the memory of GPUs is opened by the driver"
)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
RANK = 1  # whose handle is not what it should be


@dataclass(frozen=True)
class Handle:
    """The handle of a rank's memory, as `MemoryHandle` in C++ lays it out."""

    magic: bytes
    bytes: int
    token: tuple[int, int]
    pid_namespace: int
    process: int
    descriptor: int
    server: tuple[int, int]

    @classmethod
    def unpack(cls, text: bytes) -> Handle:
        magic, size, token0, token1, *where, server0, server1 = struct.unpack("8sQQQQqqQQ", text)
        return cls(magic, size, (token0, token1), *where, server=(server0, server1))

    def pack(self) -> bytes:
        where = (self.pid_namespace, self.process, self.descriptor)
        return struct.pack("8sQQQQqqQQ", self.magic, self.bytes, *self.token, *where, *self.server)


def new_runtime(rank: int) -> Any:
    """The native runtime of one of two ranks."""
    return backend.get().create_runtime(
        needs_rdma=False,
        spans_hosts=False,
        allow_nvlink=True,
        allow_mnnvl=False,
        rank=rank,
        num_ranks=2,
        num_nvl_bytes=0,
        num_rdma_bytes=1 << 20,
        low_latency_mode=True,
        num_qps_per_rank=1,
        timeout_ns=10**9,
        ranks_per_node=2,
        device_index=0,
    )


class Holder:
    """Another process that does nothing but hold descriptors."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def hold(self, descriptor: int) -> tuple[int, int]:
        """Its number, and that of the descriptor there."""
        self._process = subprocess.Popen(["sleep", "60"], pass_fds=(descriptor,))
        return self._process.pid, descriptor

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.end()


def memory(num_bytes: int, seals: int) -> int:
    """Anonymous memory that only its token tells from a rank's."""
    descriptor = os.memfd_create("deep_ep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def file(num_bytes: int, folder: Path) -> int:
    """A file that somebody else would miss."""
    path = folder / "file"
    path.write_bytes(b"\xff" * num_bytes)
    return os.open(path, os.O_RDWR)


def pipe(folder: Path) -> int:
    """A named pipe, which waits for a reader if it is opened."""
    os.mkfifo(folder / "pipe")
    return os.open(folder / "pipe", os.O_RDWR)


FOUND = [
    pytest.param(lambda size, folder: file(size, folder), "file without the seals", id="file"),
    pytest.param(lambda size, _: memory(size, 0), "file without the seals", id="unsealed"),
    pytest.param(
        lambda size, _: memory(size, fcntl.F_SEAL_SHRINK), "file without the seals", id="half-sealed"
    ),
    pytest.param(lambda size, _: memory(size - 1, SEALS), "bytes instead of", id="too-small"),
    pytest.param(lambda size, _: memory(size + 1, SEALS), "bytes instead of", id="too-large"),
    pytest.param(
        lambda size, _: memory(size, SEALS), "the memory of another buffer or job", id="no-token"
    ),
    pytest.param(
        lambda *_: os.open("/dev/zero", os.O_RDWR), "something else, no memory", id="device"
    ),
    pytest.param(lambda _, folder: pipe(folder), "something else, no memory", id="pipe"),
    pytest.param(
        lambda *_: socket.socket(socket.AF_UNIX).detach(), "something else, no memory", id="socket"
    ),
]  # fmt: skip


@opens_memory
@pytest.mark.parametrize(("make", "found"), FOUND)
def test_what_is_not_a_ranks_memory_is_refused_by_name_and_left_alone(
    make: Callable[[int, Path], int], found: str, holder: Holder, tmp_path: Path
) -> None:
    here, there = new_runtime(0), new_runtime(RANK)
    handle = Handle.unpack(there.local_handle())
    size = os.stat(f"/proc/self/fd/{handle.descriptor}").st_size
    descriptor = make(size, tmp_path)
    process, number = holder.hold(descriptor)
    false = replace(handle, process=process, descriptor=number, token=(1, 2))
    with pytest.raises(RuntimeError) as caught:
        here.connect([here.local_handle(), false.pack()])
    text = str(caught.value)
    assert f"memory of rank {RANK} (descriptor {number} of process {process})" in text
    assert found in text
    assert "build the buffer again on all ranks" in text
    if (tmp_path / "file").exists():
        assert (tmp_path / "file").read_bytes() == b"\xff" * size
    os.close(descriptor)


@opens_memory
def test_a_descriptor_that_is_gone_is_named() -> None:
    here, there = new_runtime(0), new_runtime(RANK)
    false = replace(Handle.unpack(there.local_handle()), process=os.getppid(), token=(1, 2))
    with pytest.raises(RuntimeError, match=r"memory of rank 1 .*: (No such file|Permission|there)"):
        here.connect([here.local_handle(), replace(false, descriptor=10**6).pack()])


@opens_memory
def test_who_has_too_many_files_open_is_not_told_of_namespaces() -> None:
    here, there = new_runtime(0), new_runtime(RANK)
    false = replace(Handle.unpack(there.local_handle()), process=os.getppid(), token=(1, 2))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(RuntimeError, match="Too many open files") as caught:
            here.connect([here.local_handle(), false.pack()])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "ulimit -n" in str(caught.value)
    assert "PID" not in str(caught.value)


@opens_memory
def test_a_closed_rank_of_the_same_process_is_named() -> None:
    here, there = new_runtime(0), new_runtime(RANK)
    handle = there.local_handle()
    there.close()
    with pytest.raises(RuntimeError, match="rank 1 .* of this process has closed it"):
        here.connect([here.local_handle(), handle])


@opens_memory
def test_a_rank_out_of_reach_is_told_from_its_pid_namespace() -> None:
    here, there = new_runtime(0), new_runtime(RANK)
    handle = Handle.unpack(there.local_handle())
    false = replace(handle, token=(1, 2), server=(3, 4), pid_namespace=handle.pid_namespace + 1)
    with pytest.raises(RuntimeError) as caught:
        here.connect([here.local_handle(), false.pack()])
    text = str(caught.value)
    assert (
        f"another PID namespace (pid:[{false.pid_namespace}], here pid:[{handle.pid_namespace}]"
        in text
    )
    assert "--pid=host" in text
    assert "shareProcessNamespace: true" in text


ONE_RANK = """
import sys
import torch
import deep_ep
from support.launch import init_gloo

rank, store = int(sys.argv[1]), sys.argv[2]
group = init_gloo(rank, 2, store)
size = deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 512, 2, 2)
buffer = deep_ep.Buffer(
    group,
    num_rdma_bytes=size,
    low_latency_mode=True,
    num_qps_per_rank=1,
    explicitly_destroy=True,
)
x = torch.full((1, 512), rank + 1, dtype=torch.bfloat16)
recv_x, recv_count, *_ = buffer.low_latency_dispatch(
    x, torch.tensor([[1 - rank]]), 4, 2, use_fp8=False
)
assert recv_count.tolist() == [1]
assert recv_x[0, 0].eq(2 - rank).all()
buffer.destroy()
torch.distributed.destroy_process_group()
print("exchanged")
"""
INNER_PID_NAMESPACE = ["unshare", "--user", "--pid", "--fork"]
NEW_PID_NAMESPACE = [*INNER_PID_NAMESPACE, "--mount-proc"]


@pytest.fixture(scope="module")
def may_unshare() -> None:
    """This user may make PID namespaces."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*NEW_PID_NAMESPACE, "true"], check=False).returncode
    ):
        pytest.skip("needs the right to make PID namespaces: unshare --user --pid")


def run_two_ranks(around: list[str], before_rank_1: list[str], folder: Path) -> None:
    """Runs ONE_RANK twice in a shell, behind these commands."""
    command = [sys.executable, "-c", ONE_RANK]
    store = str(folder / "store")
    script = (
        f"{shlex.join([*command, '0', store])} & "
        f"{shlex.join([*before_rank_1, *command, '1', store])} && wait $!"
    )
    ended = subprocess.run(
        [*around, "sh", "-c", script],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "DEEP_EP_BACKEND": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout.count("exchanged")) == (0, 2), ended.stderr


@pytest.mark.exhaustive
@pytest.mark.usefixtures("may_unshare")
def test_ranks_of_two_pid_namespaces_exchange(tmp_path: Path) -> None:
    run_two_ranks([], NEW_PID_NAMESPACE, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("may_unshare")
def test_ranks_whose_proc_is_that_of_an_outer_pid_namespace_exchange(tmp_path: Path) -> None:
    run_two_ranks(INNER_PID_NAMESPACE, [], tmp_path)


class ListeningGroup:
    """The first of two ranks, whose other one says `answer`; keeps what the first one says."""

    rank, size = 0, 2

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.said: list[Any] = []

    def all_gather_object(self, obj: Any) -> list[Any]:
        self.said.append(obj)
        return [obj, obj if self.answer is None else self.answer]

    def barrier(self) -> None:
        """Not needed here."""


@opens_memory
def test_ranks_of_a_new_buffer_exchange_json() -> None:
    group = ListeningGroup()
    deep_ep.Buffer(group)
    assert group.said
    for said in group.said:
        assert isinstance(json.loads(said), dict)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(pickle.dumps({"error": None}), id="pickle"),
        pytest.param({"host": "", "pid": 1, "agreed": {}, "error": None}, id="object"),
        pytest.param("no JSON", id="text"),
        pytest.param("[]", id="list"),
        pytest.param('{"host": "a", "pid": 1, "error": null}', id="field-missing"),
        pytest.param(
            '{"host": "a", "pid": 1, "agreed": {}, "error": null, "more": 1}', id="field-added"
        ),
        pytest.param('{"host": 1, "pid": 1, "agreed": {}, "error": null}', id="host-type"),
        pytest.param('{"host": "a", "pid": 1, "agreed": [], "error": null}', id="agreed-type"),
        pytest.param('{"host": "a", "pid": 1, "agreed": {}, "error": 3}', id="error-type"),
        pytest.param("[" * 100_000, id="nested"),
        pytest.param("1" * 5_000, id="digits"),
        pytest.param(
            f'{{"host": "{"a" * (1 << 20)}", "pid": 1, "agreed": {{}}, "error": null}}', id="long"
        ),
    ],
)
def test_what_is_no_fact_is_refused_by_rank(answer: Any) -> None:
    with pytest.raises(EPTransportError, match="rank 1 sent .*; ranks must send JSON") as caught:
        rendezvous.exchange_facts(ListeningGroup(answer), {"the group size": 2})
    assert len(str(caught.value)) < 500


def test_a_fact_that_a_rank_does_not_state_differs() -> None:
    group = ListeningGroup('{"host": "a", "pid": 1, "agreed": {}, "error": null}')
    with pytest.raises(EPArgumentError, match="the group size is 2 on rank 0, None on rank 1"):
        rendezvous.exchange_facts(group, {"the group size": 2})


@pytest.mark.parametrize(
    "answer", ['{"error": null}', '{"error": 1, "value": 2}', "null"], ids=["field", "type", "null"]
)
def test_what_is_no_outcome_is_refused_by_rank(answer: str) -> None:
    with pytest.raises(EPTransportError, match="rank 1 sent .*; ranks must send JSON"):
        rendezvous.together(ListeningGroup(answer), "a step", lambda: 1)


@opens_memory
@pytest.mark.parametrize("handle", [3, "no handle", "00", None])
def test_a_text_that_is_no_handle_is_refused(handle: Any) -> None:
    class OtherHandle(ListeningGroup):
        def all_gather_object(self, obj: Any) -> list[Any]:
            mine, theirs = super().all_gather_object(obj)
            outcome = json.loads(theirs)
            if isinstance(outcome.get("value"), list):
                outcome["value"][0] = handle
            return [mine, json.dumps(outcome)]

    with pytest.raises(EPTransportError, match=r"Buffer \(connecting\): ranks 0-1 failed"):
        deep_ep.Buffer(OtherHandle(), num_nvl_bytes=128)
