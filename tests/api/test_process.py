"""What a process does with buffers beyond operations: it exits while a rank waits, it forks, and it makes
many, one after the other.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

import deep_ep
from support import normal_exchange as normal
from support.launch import (
    DEVICE,
    Held,
    assert_no_more_held,
    raise_failures,
    run_processes,
    shared_memory_left,
    shared_memory_segments,
)

# Two ranks that are threads; `wait(0)` waits for rank 1, which never comes.
TWO_RANKS = """
import gc, os, sys, threading, time
import torch
import deep_ep
from deep_ep.group import thread_groups

size = deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 512, 2, 2)
groups = thread_groups(2)
buffers = [None, None]

def on_both(call):
    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

def make(rank):
    buffers[rank] = deep_ep.Buffer(
        groups[rank],
        num_rdma_bytes=size,
        low_latency_mode=True,
        num_qps_per_rank=1,
        explicitly_destroy=True,
    )

on_both(make)

def wait(rank):
    x = torch.zeros(1, 512, dtype=torch.bfloat16)
    buffers[rank].low_latency_dispatch(x, torch.zeros(1, 1, dtype=torch.int64), 4, 2)

def wait_in_a_thread():
    threading.Thread(target=wait, args=(0,), daemon=True).start()
    while buffers[0].communicator.lock.acquire(blocking=False):  # until the thread is in its operation
        buffers[0].communicator.lock.release()
        time.sleep(0.01)
    time.sleep(0.2)
"""


def run(code: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    """Runs `code` behind TWO_RANKS in a process of its own, on the CPU; operations wait `timeout_s`."""
    settings = {"DEEP_EP_BACKEND": "cpu", "DEEP_EP_TIMEOUT_S": f"{timeout_s:g}"}
    return subprocess.run(
        # From Python 3.12 on a fork beside other threads has a warning of its own.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", TWO_RANKS + code],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# The interpreter ends slowly, so that the waiting thread asks for its lock meanwhile.
SLOW_END = """
class SlowEnd:
    def __del__(self):
        time.sleep({end_s})

slow_end = SlowEnd()
wait_in_a_thread()
sys.exit(7)
"""


# A wait that is to end meanwhile is long enough to outlast the way there on a busy machine, and too short for an inquiry.
@pytest.mark.parametrize(
    ("timeout_s", "end_s"),
    [(600.0, 0.8), pytest.param(1.8, 3.0, marks=pytest.mark.exhaustive)],
    ids=["it waits on", "its wait ends"],
)
def test_the_interpreter_exits_as_told_while_a_thread_waits_for_a_rank(
    timeout_s: float, end_s: float
) -> None:
    ended = run(SLOW_END.format(end_s=end_s), timeout_s)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "", "")


IN_A_FORK = """
calls = {
    "get_comm_stream": lambda: buffers[0].get_comm_stream(),
    "get_local_buffer_tensor": lambda: buffers[0].get_local_buffer_tensor(torch.int8),
    "get_dispatch_layout": lambda: buffers[0].get_dispatch_layout(torch.zeros(1, 1).long(), 2),
    "low_latency_dispatch": lambda: wait(0),
    "clean_low_latency_buffer": lambda: buffers[0].clean_low_latency_buffer(4, 512, 2),
    "abandon_hook": lambda: buffers[0].abandon_hook(),
    "raise_failure": lambda: buffers[0].raise_failure(),
    "measure_clock_offsets": lambda: buffers[0].measure_clock_offsets(),
    "enable_counters": lambda: buffers[0].enable_counters(),
    "disable_counters": lambda: buffers[0].disable_counters(),
    "destroy": lambda: buffers[0].destroy(),
}

def refused(name, call):
    try:
        call()
    except deep_ep.errors.EPUsageError as error:
        parts = (name, f"was made in process {parent}, this is its fork {os.getpid()}", "after the fork")
        return all(part in str(error) for part in parts)

def num_mappings():
    return open("/proc/self/maps").read().count("memfd:deep_ep")

parent = os.getpid()
child = os.fork()
if child == 0:
    assert all(refused("low_latency_dispatch", hook) for hook in hooks)
    print([name for name, call in calls.items() if not refused(name, call)])
    print(num_mappings(), end=" ")
    buffers[:] = [None, None]
    hooks.clear()
    gc.collect()
    print(num_mappings(), "mappings")
    groups = thread_groups(1)
    buffers[0] = deep_ep.Buffer(
        groups[0], num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=1
    )
    wait(0)
    print("the fork's own buffer works")
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""


# No call went through, and the memory the fork shares with its parent stays as it is.
REFUSED = ["[]", "2 2 mappings", "the fork's own buffer works"]

SEND_ONLY = """
hooks = [
    buffer.low_latency_dispatch(
        torch.zeros(1, 512, dtype=torch.bfloat16),
        torch.zeros(1, 1, dtype=torch.int64),
        4,
        2,
        return_recv_hook=True,
    )[-1]
    for buffer in buffers
]
"""

THE_PARENT_GOES_ON = """
for hook in hooks: hook()
on_both(wait)
on_both(lambda rank: buffers[rank].destroy())
print("the parent goes on")
"""


def test_every_call_in_a_fork_is_refused_and_the_parent_goes_on() -> None:
    ended = run(SEND_ONLY + IN_A_FORK + THE_PARENT_GOES_ON)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [*REFUSED, "the parent goes on"]


def test_a_fork_while_another_thread_waits_is_refused_all_the_same() -> None:
    ended = run("wait_in_a_thread()\nhooks = []\n" + IN_A_FORK)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == REFUSED


def buffers_come_and_go(rank: int, group: dist.ProcessGroup) -> tuple[Held, Held]:
    """What this process holds after ten of them, and after forty more."""
    shape, mode = normal.shape_of((3, 4), 32, 12, 3), normal.Mode()
    inputs = normal.make_inputs(shape, mode)

    def live(times: int) -> Held:
        for number in range(times):
            ranks_per_node = 1 + number % 2
            with normal.nodes_of(ranks_per_node):
                buffer = deep_ep.Buffer(group, 1 << 18, 1 << 18, explicitly_destroy=True)
            expected = normal.expect(inputs, shape, mode, ranks_per_node)
            got = normal.run_exchange(buffer, expected, normal.SMALL)
            normal.assert_outputs(got, rank, expected, normal.SMALL)
            buffer.destroy()
        return Held.now()

    return live(10), live(40)


@pytest.mark.exhaustive
@pytest.mark.skipif(DEVICE != "cpu", reason="ranks that are processes share no GPU")
def test_buffers_that_come_and_go_leave_nothing_in_processes() -> None:
    """Where each has connections and descriptors to the others."""
    segments = shared_memory_segments()
    for warm, later in raise_failures(run_processes(buffers_come_and_go, 2)):
        assert_no_more_held(later, warm)
    assert not shared_memory_left(segments)
