"""What people posted of runs that timed out: the address of each thread, some lines as they stand there, and what was answered.

Home folders in the lines are /home/user here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LogReport:
    """A report.

    Attributes:
        thread: where it stands.
        answer: what maintainers, or in the end the reporter, found; empty if the thread has none.
        lines: of the log, and no others.
        says: text that the answer has to have.
        ranks: that are named, in the numbers of the lines.
        kind: of the cause; empty if nobody waits.
    """

    thread: str
    answer: str
    lines: str
    says: str
    ranks: tuple[int, ...] = ()
    kind: str = "undecided"


_GITHUB = "https://github.com/"
REPORTS = (
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/issues/570",
        "",
        """
> DeepEP timeout check failed: rank = 6, thread = 0, value = 0)
> DeepEP timeout check failed: rank = 6, thread = 1, value = 0)
> DeepEP timeout check failed: rank = 6, thread = 5, value = 1024)
> DeepEP timeout check failed: rank = 6, thread = 6, value = 0)
> DeepEP timeout check failed: rank = 2, thread = 4, value = 0)
> DeepEP timeout check failed: rank = 2, thread = 5, value = 1024)
""",
        "rank 5 has not come to the barrier within the node; ranks 2, 6 wait for it",
        (5,),
        "not_come",
    ),
    LogReport(
        f"{_GITHUB}vllm-project/vllm/issues/46509",
        "The reporter: such as after a failure of RDMA between nodes",
        """
[pod/wide-ep-llm-d-prefill-0/vllm] (Worker_DP7_EP7 pid=4757) RuntimeError: DeepEP error: timeout (dispatch CPU)
[pod/wide-ep-llm-d-prefill-0/vllm] DeepEP timeout check failed: rank = 7, thread = 0, value = 1024)
[pod/wide-ep-llm-d-prefill-0/vllm] DeepEP timeout check failed: rank = 7, thread = 1, value = 0)
[pod/wide-ep-llm-d-prefill-0/vllm] DeepEP timeout check failed: rank = 7, thread = 6, value = 0)
[pod/wide-ep-llm-d-prefill-0/vllm] DeepEP timeout check failed: rank = 7,""",
        "rank 0 has not come to the barrier within the node; rank 7 waits for it",
        (0,),
        "not_come",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/issues/137",
        "",
        """
DeepEP dispatch forwarder timeout (RDMA meta), channel: 4, RDMA: 1, nvl: 4, src RDMA lane: 0, dst NVL: 5, meta: 0, 0, 0, 0
DeepEP dispatch NVL receiver timeout, channel: 9, RDMA: 1, nvl: 3, src RDMA: 0, src nvl: 3, start: 0, end: 0
DeepEP dispatch NVL receiver timeout, channel: 5, RDMA: 1, nvl: 6, src RDMA: 0, src nvl: 4, start: 0, end: 0
DeepEP dispatch forwarder timeout (RDMA meta), channel: 4, RDMA: 1, nvl: 4, src RDMA lane: 0, dst NVL: 6, meta: 0, 0, 0, 0
""",
        "of ranks 3-4, for whom they wait, there is no such line; all that is missing comes over the network (nodes 0 > 1)",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/issues/137",
        "",
        "DeepEP timeout check failed: 0\n",
        "a process of DeepEP V1 waits at a barrier of dispatch or combine",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/pull/181",
        "Merged, because a queue pair must not be given work by several at once; no rank was the reason",
        """
DeepEP RDMA sender coordinator timeout, channel: 1, IB: 0, nvl 4, dst IB: 0, tail 120, num_tokens_to_send 221
DeepEP RDMA sender coordinator timeout, channel: 1, IB: 0, nvl 4, dst IB: 1, tail 120, num_tokens_to_send 221
DeepEP dispatch NVL receiver timeout, channel: 0, RDMA: 0, nvl: 4, src RDMA: 1, src nvl: 7, start: 0, end: 0
DeepEP dispatch NVL receiver timeout, channel: 7, RDMA: 0, nvl: 4, src RDMA: 0, src nvl: 5, start: 0, end: 0
DeepEP dispatch forwarder timeout (RDMA meta), channel: 0, RDMA: 0, nvl: 7, src RDMA lane: 1, dst NVL: 1, meta: 0, 0, 0, 0
""",
        "rank 4 waits in dispatch, for slots of a node's queue or for rows to send",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/issues/74",
        "Maintainers ask for adaptive routing, SR-IOV and IOMMU",
        """
DeepEP dispatch NVL receiver timeout, channel: 10, ROMA: 1, nvl: 1, src RDMA: 3, src nul: 8, start: 8, end: 8
DeepEP dispatch NVL receiver timeout, channel: 10, RDMA: 1, nvl: 5, src ROMA: 3, src nvl: 0, start: 8, end: 0
""",
        "in dispatch NVL receiver",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/issues/274",
        "",
        """
WARN: IB: read failed in ib_roce_get_version_num: Invalid argument
DeepEP dispatch NVL receiver timeout, channel: 6, RDMA: 0, nvl: 0, src NVL: 5, head: 315, tail: 315
DeepEP dispatch NVL receiver timeout, channel: 10, RDMA: 0, nvl: 0, src NVL: 5, head: 300, tail: 300
terminate called after throwing an instance of 'EPException'
  what():  Failed: CUDA error /workspace/DeepEP/csrc/deep_ep.cpp:83 'unspecified launch failure'
DeepEP dispatch NVL receiver timeout, channel: 8, RDMA: 0, nvl: 3, src NVL: 5, head: 324, tail: 324
""",
        "ranks 0, 3 wait in dispatch, for rows that a rank of the node passes on; of rank 5, for whom they wait",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/issues/326",
        "Of #314, which looks the same, a maintainer says that a small buffer does it; #353 mended the kernel",
        """
DeepEP combine RDMA receiver timeout, channel: 5, RDMA: 2, nvl: 7, src RDMA: 1, tail: 576, waiting: 4057, expect: 580
DeepEP combine RDMA receiver timeout, channel: 5, RDMA: 2, nvl: 7, src RDMA: 1, tail: 576, waiting: 4054, expect: 577
DeepEP combine forwarder (RDMA check) timeout, channel: 5, RDMA: 2, nvl: 0, dst RDMA: 1, head: 384, tail: 512, chunked: 8
DeepEP combine forwarder (RDMA check) timeout, channel: 8, RDMA: 2, nvl: 0, dst RDMA: 1, head: 416, tail: 544, chunked: 8
""",
        "rank 16 waits in combine, for slots of a node's queue; of ranks 8, 15, for whom they wait, there is no such line",
    ),
    LogReport(
        f"{_GITHUB}sgl-project/sglang/issues/6017",
        "",
        """
DeepEP combine RDMA receiver timeout, channel: 11, RDMA: 0, nvl: 3, src RDMA: 0, tail: 0, waiting: 7530, expect: 17
DeepEP combine RDMA receiver timeout, channel: 11, RDMA: 0, nvl: 3, src RDMA: 0, tail: 0, waiting: 7516, expect: 3
""",
        "rank 3 waits in combine, for rows from a node; what they miss, they pass on themselves",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/issues/13",
        "A maintainer: it looks like a problem of the network",
        """
[testing] Running with BF16, without top-k (async=True, previous=True) ...Global rank: 13, num_recv_tokens: -1, num_rdma_recv_tokens: -1
moe_recv_expert_counter[0]: -1
Global rank: 15, num_recv_tokens: -1, num_rdma_recv_tokens: -1
moe_recv_expert_counter[0]: -1
Global rank: 10, num_recv_tokens: -1, num_rdma_recv_toke""",
        "ranks 13, 15 wait in dispatch, on the host, for the counts of all ranks; the lines do not say for whom",
    ),
    LogReport(
        f"{_GITHUB}sgl-project/sglang/issues/15598",
        "Pull requests 15891 and 23185: compile DeepGEMM before, and with a barrier",
        """
DeepGEMM warmup:   2%|#.                                | 11/512 [01:09<57:05,  6.84s/it][2025-12-22 11:36:30 TP1 EP1] Scheduler hit an exception: Traceback (most recent call last):
RuntimeError: DeepEP error: CPU recv timeout
""",
        "A rank compiled DeepGEMM kernels",
    ),
    LogReport(
        f"{_GITHUB}sgl-project/sglang/pull/15891",
        "Merged: it compiles before it serves",
        "[2025-12-26 08:51:31 DP0 TP0 EP0] Entering DeepGEMM JIT Pre-Compile session. It may take a long time (typically 10-20 mins)\n",
        "",
        kind="",
    ),
    LogReport(
        f"{_GITHUB}sgl-project/sglang/pull/23185",
        "Ranks compiled at different speeds; a barrier before that was merged",
        """
    recv_src_meta, send_rdma_head, send_nvl_head, event = self.runtime.internode_dispatch(
                                                          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
RuntimeError: DeepEP error: timeout (dispatch CPU)
""",
        "Look for a rank that raised, compiles or left the call out",
    ),
    LogReport(
        f"{_GITHUB}vllm-project/vllm/pull/27666",
        "A fault of dual-batch overlap, mended by this request",
        "\x1b[1;36m(EngineCore_DP0 pid=2344883)\x1b[0;0m RuntimeError: DeepEP error: CPU recv timeout\n",
        "rank 0 waits in dispatch, on the host, for the counts of all ranks",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/pull/715",
        "Merged: the barrier did not publish stores over NVLink; no rank was the reason",
        "  DeepEP Gin barrier timeout, tag: 4, scaleout: 1, scaleup: 0/8, signal: 14, target: 15\n",
        "rank 8 waits at the barrier over the network, with 14 of 15 signals (tag 4); the lines do not say for whom",
    ),
    LogReport(
        f"{_GITHUB}pytorch/torchtitan/issues/3877",
        "",
        """
DeepEP combine (scale-up wait) timeout, scale-out: 6/8, scale-up: N/8,
channel: C, lane: L, recv: 0, tail: -1 (wait=0)
CUDA error: unspecified launch failure
""",
        "a process of DeepEP waits in combine (scale-up wait)",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/issues/411",
        "",
        """
[rank7]:[E916 08:53:53.794121333 ProcessGroupNCCL.cpp:633] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLGATHER, NumelIn=1, NumelOut=16, Timeout(ms)=600000) ran for 600023 milliseconds before timing out.
[rank7]:[E916 08:53:53.794631106 ProcessGroupNCCL.cpp:2289] [PG ID 1 PG GUID 1 Rank 7]  failure detected by watchdog at work sequence id: 1 PG status: last enqueued work: 1, last completed work: -1
[rank3]:[E916 08:53:53.813635437 ProcessGroupNCCL.cpp:633] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLGATHER, NumelIn=1, NumelOut=16, Timeout(ms)=600000) ran for 600042 milliseconds before timing out.
[rank3]:[E916 08:53:53.814173265 ProcessGroupNCCL.cpp:2289] [PG ID 1 PG GUID 1 Rank 3]  failure detected by watchdog at work sequence id: 1 PG status: last enqueued work: 1, last completed work: -1
""",
        "ranks 3, 7 wait in ALLGATHER 1",
    ),
    LogReport(
        f"{_GITHUB}pytorch/pytorch/issues/152623",
        "",
        """
[rank0]:[E515 18:36:47.341808597 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=241, OpType=ALLREDUCE, NumelIn=6, NumelOut=6, Timeout(ms)=600000) ran for 600086 milliseconds before timing out.
[rank0]:[E515 18:36:47.343377708 ProcessGroupNCCL.cpp:1937] Rank 0
         - [0] Timeout at collective: ALLREDUCE, #315
         - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:
             [7] finished collective #182, but didn't join collective #183 (count from 1)
         - Snapshot of ranks' latest states:
           #182 finished ranks:
             [7] finished ALLREDUCE
           #315 started ranks:
             [0, 1, 2] started ALLREDUCE
[rank0]:[E515 18:36:47.343391940 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID 0(default_pg) Rank 0]  failure detected by watchdog at work sequence id: 241 PG status: last enqueued work: 315, last completed work: 183
""",
        "rank 7 has not come to collective 183, counted from 1",
        (7,),
        "not_come",
    ),
    LogReport(
        f"{_GITHUB}NVIDIA/nccl/issues/849",
        "",
        "RuntimeError: [Rank 0]: Ranks 4, 5, 6, 7 failed to pass monitoredBarrier in 2000000 ms\n",
        "ranks 4-7 have not come to monitored_barrier; rank 0 waits for them, for 2e+03 s",
        (4, 5, 6, 7),
        "not_come",
    ),
    LogReport(
        f"{_GITHUB}pytorch/pytorch/issues/121606",
        "Of such lines #83289 says that rank 0 and others may blame each other",
        "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n",
        "rank 2 waits at monitored_barrier, and lost its connection to rank 0",
    ),
    LogReport(
        f"{_GITHUB}OpenRLHF/OpenRLHF/issues/1126",
        "",
        """
[rank2]:[E901 05:20:03.118859045 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a collective timeout from  rank 6 and we will try our best to dump the debug info. Last enqueued NCCL work: 460631, last completed NCCL work: 460630.This is most likely caused by incorrect usages of collectives
[rank7]:[E901 05:20:03.123992144 ProcessGroupNCCL.cpp:632] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=460631, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.
[rank7]:[E901 05:20:03.124073319 ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank 7]  failure detected by watchdog at work sequence id: 460631 PG status: last enqueued work: 460631, last completed work: 460630
""",
        "rank 7 waits in ALLREDUCE 460631",
    ),
    LogReport(
        f"{_GITHUB}snowflakedb/ArcticTraining/issues/219",
        "",
        """
[rank5]:[E626 16:48:25.440238649 ProcessGroupNCCL.cpp:2268] [PG ID 0 PG GUID 0(default_pg) Rank 5]  failure detected by watchdog at work sequence id: 120049 PG status: last enqueued work: 120051, last completed work: 120048
[rank7]:[E626 16:48:25.440228878 ProcessGroupNCCL.cpp:1533] [PG ID 0 PG GUID 0(default_pg) Rank 7] ProcessGroupNCCL preparing to dump debug info. Include stack trace: 1
""",
        "rank 5 waits in collective 120049; the lines do not say for whom",
    ),
    LogReport(
        f"{_GITHUB}Intellindust-AI-Lab/DEIM/issues/105",
        "",
        "[rank1]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 1] [PG 0 Rank 1] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives.\n",
        "rank 1 waits in a call of CUDA or NCCL that does not return",
    ),
    LogReport(
        f"{_GITHUB}NVIDIA/nccl/issues/1664",
        "A maintainer: such errors often mean problems of connectivity",
        "NET/IBP:Got completion from peer 7.6.13.83<36315> with status=12 opcode=32698 len=32696 vendor err 129 (Send)\n",
        "a NIC gave up a transfer between its host and 7.6.13.83: status 12 (no acknowledgement, in spite of retries)",
    ),
    LogReport(
        f"{_GITHUB}NVIDIA/nccl/issues/1405",
        "",
        "kp-ddp-worker-0:3468:3905 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.216.210.236<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid fd00:1148:9000:5000:4:200:3:ff22 remoteGidsfd00:1148:9000:5000:4:200:3:ff1f\n",
        "a NIC gave up a transfer between its host and 10.216.210.236",
    ),
    LogReport(
        f"{_GITHUB}NVIDIA/nccl/issues/426",
        "A maintainer: the NICs cannot talk over RoCE; users: NCCL_IB_GID_INDEX=3",
        "-worker-1:946:988 [0] transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129\n",
        "a NIC gave up a transfer: status 12 (no acknowledgement, in spite of retries)",
    ),
    LogReport(
        f"{_GITHUB}NVIDIA/nccl/issues/769",
        "A maintainer: that GID is the address of a link only, and is not routed",
        "ibvwrap.cc: NCCL WARN Call to ibv_modify_qp failed with error Connection timed out\n",
        "NICs could not be connected: Connection timed out. Check that each NIC reaches all others",
    ),
    LogReport(
        f"{_GITHUB}pytorch/pytorch/issues/150916",
        "The agent on that host had been killed on purpose",
        "socketProgress: Connection closed by remote peer ip-172-31-36-217.eu-north-1.compute.internal<59116>\n",
        "a process on ip-172-31-36-217.eu-north-1.compute.internal closed its connection, so it has ended",
    ),
    LogReport(
        f"{_GITHUB}NVIDIA/nccl/issues/296",
        "A maintainer: other sizes, or another order, on some ranks",
        "init.cc:1247 NCCL WARN Mismatched collective detected, please check your collective calls at and around rank 39. You can use NCCL_DEBUG=INFO\n",
        "not all ranks call the same collective",
    ),
    LogReport(
        f"{_GITHUB}NVIDIA/nccl/issues/531",
        "",
        "n136-081-017:201805:201927 [0] transport/net_ib.cc:667 NCCL WARN NET/IB : collective mismatch error local size 32768 remote 1048576 addr 0 rkey 3beac3 seq adf/adf\n",
        "not all ranks call the same collective, or not with the same size: 32768 and 1048576 bytes",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/issues/17",
        "",
        """
/home/user/nvshmem_src/src/modules/transport/ibgda/ibgda.cpp:1345: non-zero status: 121 Error in mlx5dv_devx_obj_modify for INIT2RTR_QP with syndrome 29e0df
/home/user/nvshmem_src/src/modules/transport/ibgda/ibgda.cpp:3005: non-zero status: 7 ibgda_rc_init2rtr failed on RC #0.
""",
        "NVSHMEM could not be set up: Error in mlx5dv_devx_obj_modify for INIT2RTR_QP with syndrome 29e0df, status 121 (Remote I/O error)",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/issues/139",
        "A maintainer: IBGDA is needed on RoCE as well",
        "/repo/nvshmem_src/src/host/transport/transport.cpp:nvshmemi_transport_init:275: init failed for transport: IBGDA\n",
        "NVSHMEM could not be set up: no transport IBGDA",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/issues/38",
        "",
        """
/home/user/nvshmem_src/src/modules/transport/ibrc/ibrc.cpp:418: non-zero status: 110 ibv_modify_qp failed
/home/user/nvshmem_src/src/modules/transport/ibrc/ibrc.cpp:418: non-zero status: 110 /home/user/nvshmem_src/src/modules/transport/ibrc/ibrc.cpp:1433: non-zero status: 7
""",
        "NVSHMEM could not be set up: ibv_modify_qp failed, status 110 (Connection timed out)",
    ),
    LogReport(
        f"{_GITHUB}NVIDIA/nvshmem/issues/33",
        "A maintainer: ibv_create_ah failed; test the fabric itself",
        """
/dvs/p4/build/sw/rel/gpgpu/toolkit/r12.9/main_nvshmem/src/modules/transport/ibgda/ibgda.cpp:2234: NULL value Unable to create ah.
/dvs/p4/build/sw/rel/gpgpu/toolkit/r12.9/main_nvshmem/src/host/transport/transport.cpp:420: non-zero status: 7 connect EPS failed
""",
        "NVSHMEM could not be set up: Unable to create ah; NVSHMEM could not be set up: connect EPS failed, status 7 (internal error)",
    ),
    LogReport(
        f"{_GITHUB}deepseek-ai/DeepEP/issues/223",
        "",
        "/sgl-workspace/nvshmem/src/host/topo/topo.cpp:477: non-zero status: -6 allgather of ipc handles failed\n",
        "allgather of ipc handles failed, status -6 (the connection to another process failed)",
    ),
    LogReport(
        f"{_GITHUB}sgl-project/sglang/issues/12533",
        "The container had no rights to the devices",
        "/opt/nvshmem/nvshmem/src/modules/transport/ibgda/ibgda.cpp:1889: NULL value cannot allocate mlx5dv_devx_uar\n",
        "the container's rights to the devices",
    ),
    LogReport(
        f"{_GITHUB}sgl-project/sglang/issues/7888",
        "",
        "NVSHMEM API called before NVSHMEM initialization has completed\n",
        "NVSHMEM was called before it was set up",
    ),
    LogReport(
        f"{_GITHUB}sgl-project/sglang/issues/3752",
        "",
        """
[2025-03-09 00:57:15 TP4] Watchdog timeout (self.watchdog_timeout=300)
[2025-03-09 00:57:15 TP6] Watchdog timeout (self.watchdog_timeout=300)
[2025-03-09 00:57:16 TP0] Watchdog timeout (self.watchdog_timeout=300)
""",
        "ranks 0, 4, 6 wait in a batch that does not end; the lines do not say for whom",
    ),
    LogReport(
        f"{_GITHUB}sgl-project/sglang/issues/17941",
        "",
        "[2026-01-29 13:12:37 PP1 TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n",
        "rank 0 waits in a batch that does not end",
    ),
    LogReport(
        f"{_GITHUB}vllm-project/vllm/issues/44185",
        "",
        """
(EngineCore_DP1 pid=1455) INFO 05-28 14:44:28 [shm_broadcast.py:681] No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization).
(EngineCore_DP0 pid=1454) INFO 05-28 14:45:27 [shm_broadcast.py:681] No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization).
""",
        "ranks 0-1 wait for workers, which may compile or load",
    ),
    LogReport(
        f"{_GITHUB}intel/llm-scaler/issues/77",
        "",
        "ERROR 09-06 04:14:11 [core.py:640] TimeoutError: RPC call to execute_model timed out.\n",
        "a process of vLLM waits for a worker that should have answered execute_model",
    ),
    LogReport(
        f"{_GITHUB}OpenPipe/ART/issues/201",
        "",
        """
DEBUG 07-04 17:35:10 [shm_broadcast.py:456] No available shared memory broadcast block found in 60 second.
ERROR 07-04 17:35:16 [multiproc_executor.py:140] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.
DEBUG 07-04 17:36:10 [shm_broadcast.py:456] No available shared memory broadcast block found in 60 second.
""",
        "rank 1, as vLLM counts, ended, and others waited before",
    ),
    LogReport(
        f"{_GITHUB}intel/llm-scaler/issues/154",
        "",
        """
eap-llm-server-on-arc  | ERROR 11-08 11:01:29 [multiproc_executor.py:135] Worker proc VllmWorker-3 died unexpectedly, shutting down executor.
eap-llm-server-on-arc  | ERROR 11-08 11:01:30 [core.py:502] EngineCore encountered a fatal error.
""",
        "rank 3 is dead: the process is gone; nobody waits for it yet",
        (3,),
        "gone",
    ),
    LogReport(
        f"{_GITHUB}open-mpi/ompi/issues/2661",
        "A maintainer asks for the kernel's log of what it killed for memory; there was too little of it",
        "mpirun noticed that process rank 0 with PID 21183 on node host01 exited on signal 9 (Killed).\n",
        "rank 0 is dead: the process is gone (process 21183)",
        (0,),
        "gone",
    ),
    LogReport(
        f"{_GITHUB}hpcaitech/ColossalAI/issues/3514",
        "",
        """
WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 812914 closing signal SIGTERM
ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 3 (pid: 812917) of binary: /data/chenhao/anaconda3/envs/ColossalAI-Chat/bin/python
""",
        "rank 3 is dead: the process is gone (process 812917)",
        (3,),
        "gone",
    ),
)
