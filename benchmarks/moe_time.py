"""What the functions of `deep_ep.moe` add to the bare calls on the host: one rank, few and small tokens.

All ways alternate in one run; times are medians of a dispatch and a combine, forward and backward. The bare calls
are layout, dispatch, combine, and for the way back combine and cached dispatch, without autograd.

    python benchmarks/moe_time.py [--rounds 400]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ["DEEP_EP_BACKEND"] = "cpu"

import torch  # noqa: E402
from _tables import Table  # noqa: E402
from rich.console import Console  # noqa: E402

import deep_ep  # noqa: E402
from deep_ep import moe  # noqa: E402
from deep_ep.group import thread_groups  # noqa: E402

NUM_TOKENS, HIDDEN, NUM_EXPERTS, NUM_TOPK = 8, 128, 4, 2
WARM_UP_ROUNDS = 20


def ways() -> dict[str, Callable[[], None]]:
    """By name, a round of each way to exchange."""
    needed = deep_ep.sizes(
        hidden=HIDDEN, tokens=NUM_TOKENS, topk=NUM_TOPK, experts=NUM_EXPERTS, ranks=1
    )
    buffer = deep_ep.Buffer(thread_groups(1)[0], needed.num_nvl_bytes, needed.num_rdma_bytes)
    x = torch.randn(NUM_TOKENS, HIDDEN).bfloat16().requires_grad_()
    topk_idx = torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(NUM_TOPK).indices
    weights = torch.rand(NUM_TOKENS, NUM_TOPK).requires_grad_()
    grad = torch.randn(NUM_TOKENS, HIDDEN).bfloat16()

    def bare() -> None:
        with torch.no_grad():
            per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(
                topk_idx, NUM_EXPERTS
            )
            rows, _, recv_weights, _, handle, _ = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=topk_idx,
                topk_weights=weights,
            )
            buffer.combine(rows, handle)
            rows = buffer.dispatch(grad, handle=handle)[0]
            buffer.combine(rows, handle, topk_weights=recv_weights)

    def functions(permute: bool) -> None:
        sent = moe.dispatch(x, topk_idx, weights, buffer, NUM_EXPERTS, permute=permute)
        moe.combine(sent.x, sent).backward(grad)

    return {
        "bare calls": bare,
        "deep_ep.moe, rows as they came": lambda: functions(False),
        "deep_ep.moe, rows by expert, weighed": lambda: functions(True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=400)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rounds = ways()
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for number in range(WARM_UP_ROUNDS + given.rounds):
        for name, run in rounds.items():
            begin = time.perf_counter()
            run()
            if number >= WARM_UP_ROUNDS:
                times[name].append(time.perf_counter() - begin)
    bare, *_ = medians = [statistics.median(values) for values in times.values()]
    rows = [
        (name, f"{median * 1e6:.0f}", f"{(median - bare) * 1e6:+.0f}")
        for name, median in zip(times, medians)
    ]
    Table("A round, forward and backward", ("way", "us", "over bare"), rows).show(Console())


if __name__ == "__main__":
    main()
