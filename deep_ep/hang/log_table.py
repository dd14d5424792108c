"""What libraries print when they time out: one table, in which a row is a message as it is printed and what it says.

The formats come from public threads, which `tests/hang/log_reports.txt` cites; none comes from a library's source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from deep_ep.base.text import rows_of
from deep_ep.hang.states import Owed

# Of each message: the library | in which numbers ranks are, and what is waited for | where who prints it waits, or all
# that it says | what to check (names in `CHECKS`). Then the message: {name} is a number, {name:kind} something else
# (`_KINDS`), {} anything that does not matter.
#
# Numbers: "node" counts within a node, "group" in the group of the operations, "torch" in a group of torch; with "prefix" the line
# has none, and the prefix of its launcher may. "text" is about processes, "dead" one that ended, "aside" only explains.
# Who waits is {rank}, or {place} on {node}; for {owed}, or {from_place} on {from_node}; of these the one that is not
# there is the same as of who waits.
_TABLE = """
DeepEP V1 | node entry | at the barrier within the node | rank
DeepEP timeout check failed: rank = {rank}, thread = {owed}, value = {value})

DeepEP V1 | group rows | in dispatch, for what a source sends by way of this node | network
DeepEP dispatch NVL receiver timeout, channel: {}, RDMA: {node}, nvl: {place}, src RDMA: {from_node}, src nvl: {from_place}, start

DeepEP V1 | group rows | in dispatch, for rows that a rank of the node passes on | gateway network
DeepEP dispatch NVL receiver timeout, channel: {}, RDMA: {node}, nvl: {place}, src NVL: {from_place}, head

DeepEP V1 | group rows | in dispatch, for counts from another node | network
DeepEP dispatch forwarder timeout (RDMA meta), channel: {}, RDMA: {node}, nvl: {place}, src RDMA lane: {from_node}, dst

DeepEP V1 | group slots | in dispatch, for slots of a node's queue or for rows to send | network
DeepEP RDMA sender coordinator timeout, channel: {}, IB: {node}, nvl {place}, dst IB: {from_node}, tail

DeepEP V1 | group rows | in combine, for rows from a node | network
DeepEP combine RDMA receiver timeout, channel: {}, RDMA: {node}, nvl: {place}, src RDMA: {from_node}, tail

DeepEP V1 | group slots | in combine, for slots of a node's queue | slots network
DeepEP combine forwarder (RDMA check) timeout, channel: {}, RDMA: {node}, nvl: {place}, dst RDMA: {from_node}, head

DeepEP V1 | group entry | in dispatch, on the host, for the counts of all ranks | others network
Global rank: {rank}, num_recv_tokens: -1, num_rdma_recv_tokens: {rdma}

DeepEP V1 | prefix entry | in dispatch, on the host, for the counts of all ranks | others
DeepEP error: {:host_wait}

DeepEP V2 | group entry | at the barrier over the network, with {signal} of {target} signals (tag {tag}) | signals others network
DeepEP Gin barrier timeout, tag: {tag}, scaleout: {node}, scaleup: {place}/{places}, signal: {signal}, target: {target}

DeepEP V1 | group rows | in {step} | others network
DeepEP {step:step} timeout, channel: {}, RDMA: {node}, nvl: {place},

DeepEP | prefix rows | in {step} | others network
DeepEP {step:step} timeout,

DeepEP V1 | prefix entry | at a barrier of dispatch or combine | rank
DeepEP timeout check failed: {value}

NVSHMEM | text | NVSHMEM could not be set up: {said}status {status} ({meaning}) | nics
non-zero status: {status}{said:said}

NVSHMEM | text | NVSHMEM could not be set up: {said} | nics
NULL value{said:said}

NVSHMEM | text | NVSHMEM could not be set up: no transport {transport} | nics
init failed for {:gap}transport: {transport:word}

NVSHMEM | text | NVSHMEM was called before it was set up: an earlier line says why it was not | nics
NVSHMEM API called before NVSHMEM initialization has completed

NCCL | text | a NIC gave up a transfer between its host and {peer}: status {verbs} ({meaning}) | ends
Got completion from peer {peer:host}<{}> with status={verbs} opcode

NCCL | text | a NIC gave up a transfer: status {verbs} ({meaning}) | ends nics
Got completion with error {verbs}, opcode

NCCL | text | NICs could not be connected: {said} | nics
Call to ibv_modify_qp failed with error{said:said}

NCCL | text | a process on {peer} closed its connection, so it has ended | ended
Connection closed by remote peer {peer:host}<

NCCL | text | not all ranks call the same collective | order
Mismatched collective detected, please check your collective calls at and around rank {near}.

NCCL | text | not all ranks call the same collective, or not with the same size: {local} and {remote} bytes | order
collective mismatch error local size {local} remote {remote} addr

torch | torch entry | in collective {number}, counted from 1 | rank
[{owed:list}] finished collective #{last}, but didn't join collective #{number} (count

torch | torch entry | at monitored_barrier | rank
[Rank {rank}]: Ranks {owed:list} failed to pass monitoredBarrier in {} ms

torch | torch entry | at monitored_barrier, and lost its connection to rank {peer} | ended
Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank {peer}.

torch | torch entry | in collective {number} | dumps
[PG {group:group}Rank {rank}] {:gap}detected by watchdog at work sequence id: {number} PG status: last enqueued work: {enqueued}, last completed work: {completed}

torch | aside | | dumps
[PG {group:group}Rank {at}] Received a dump signal {:gap}Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.

torch | torch entry | in {operation} {number} | dumps
[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType={operation:word}, {:gap}ran for {} milliseconds

torch | torch entry | in a call of CUDA or NCCL that does not return | stacks
[PG {group:group}Rank {rank}] ProcessGroupNCCL's watchdog got stuck for {} seconds

vLLM | prefix entry | for workers, which may compile or load | stacks
No available shared memory broadcast block found in {} second

vLLM | prefix entry | for a worker that should have answered {call} | stacks
RPC call to {call:word} timed out

vLLM | dead | | log
Worker proc VllmWorker-{dead} died unexpectedly

mpirun | dead | | memory
mpirun noticed that process rank {dead} with PID {pid} on node {:gap} exited on signal 9

torchrun | dead | | memory
failed (exitcode: -9) local_rank: {dead} (pid: {pid})

SGLang | prefix entry | in a batch that does not end | idle stacks
atchdog timeout (self.watchdog_timeout={}

SGLang | aside | | compiling
Entering DeepGEMM JIT Pre-Comp

SGLang | aside | | compiling
DeepGEMM warmup: {}%
"""

CHECKS = {
    "rank": "Read that rank's own log first; then its stack (py-spy dump) and its GPU (nvidia-smi, dmesg for Xid errors).",
    "others": "Look for a rank that raised, compiles or left the call out; one that only takes long has to be warm before the first "
    "dispatch, because the limit of 100 s is compiled in.",
    "network": "Check the network between the nodes: errors of NICs, adaptive routing, SR-IOV and IOMMU, the same NVSHMEM everywhere, and "
    "ib_write_bw between all pairs.",
    "gateway": "Look at the GPU of the rank that passes them on, and at its NIC.",
    "slots": "A Config with larger buffers may avoid it.",
    "signals": "The line does not say whose signal is missing.",
    "nics": "Check that each NIC reaches all others, NVSHMEM_HCA_LIST or NVSHMEM_HCA_PE_MAPPING, NVSHMEM_IB_GID_INDEX on RoCE, "
    "nvidia-peermem, and the container's rights to the devices.",
    "ends": "Either end, or what is between them, may be the reason; a process that died looks the same from the other end.",
    "ended": "Read the logs of the other end: what stands there before this is the reason.",
    "order": "Compare the collectives of all ranks (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=COLL).",
    "dumps": "Set TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT=1, and read the dumps of all ranks with this command.",
    "stacks": "Take the stacks of all ranks (py-spy dump): one that is elsewhere is the reason.",
    "log": "Read that worker's own log.",
    "memory": "Signal 9 mostly comes from the kernel, for memory: dmesg on that host.",
    "idle": "A rank whose scheduler is idle prints no such line, and may be the one that did not come.",
    "compiling": "A rank compiled DeepGEMM kernels, for longer than others wait: compile before (python -m sglang.compile_deep_gemm).",
}

# Of numbers, those of ranks: what has more digits is none.
_OF_RANKS = "rank", "at", "dead", "owed", "node", "place", "places", "from_node", "from_place"
_KINDS = {
    "": r"-?\d{1,18}",
    "rank": r"\d{1,4}",
    "list": r"\d{1,4}(?:, \d{1,4})*",
    "word": r"\w+",
    "host": r"[^\s<]+",
    "group": r"[^\]]*?",
    "gap": r".*?",
    "said": r"[ :]*(?:[A-Za-z][^/\n]{0,90})?",
    "step": r"[A-Za-z]+(?: [A-Za-z]+| \([\w -]+\)){0,4}",
    "host_wait": r"(?:timeout \(dispatch CPU\)|CPU recv timeout)",
}
# Of completions of verbs; 7 and below 0 are NVSHMEM's own; what else it prints is an errno.
_VERBS = {
    "5": "flushed after an earlier error",
    "12": "no acknowledgement, in spite of retries",
    "13": "the other end was not ready",
}
_NVSHMEM = {"7": "internal error", "-6": "the connection to another process failed"}


@dataclass(frozen=True)
class LogRow:
    """A message; see `_TABLE`.

    Attributes:
        library: which prints it.
        numbers: in which ranks are.
        what: is waited for.
        says: where the waiter is, or all that the line says.
        checks: names in `CHECKS`.
        pattern: of the message.
    """

    library: str
    numbers: str
    what: Owed
    says: str
    checks: tuple[str, ...]
    pattern: re.Pattern[str]

    def said(self, fields: Mapping[str, str]) -> str:
        """What it says, with the numbers of a line."""
        status, said = fields.get("status", ""), fields.get("said", "").strip(" :.")
        meaning = _VERBS.get(fields.get("verbs", ""), "not in the table")
        if status:
            meaning = _NVSHMEM.get(status) or os.strerror(min(abs(int(status)), 4096))
            said += ", " if said else ""
        return self.says.format(**{**fields, "meaning": meaning, "said": said})


def _rows() -> tuple[LogRow, ...]:
    found = []
    for library, kind, says, checks, message in rows_of(_TABLE):
        numbers, _, what = kind.partition(" ")
        pattern = re.compile(_pattern(message))
        owed = cast("Owed", what or "rows")
        found.append(LogRow(library, numbers, owed, says, tuple(checks.split()), pattern))
    return tuple(found)


def _pattern(message: str) -> str:
    parts = re.split(r"\{(\w*)(?::(\w+))?\}", message)
    found = re.escape(parts[0])
    for name, kind, text in zip(parts[1::3], parts[2::3], parts[3::3]):
        inside = _KINDS[kind or ("rank" if name in _OF_RANKS else "")]
        found += f"(?P<{name}>{inside})" if name else f"(?:{inside})"
        found += re.escape(text)
    return found.replace(r"\ ", " +")


ROWS = _rows()
