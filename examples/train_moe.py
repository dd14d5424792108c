"""Trains a small mixture-of-experts transformer whose experts live on several ranks.

    python examples/train_moe.py --num-processes 4            # experts on four ranks
    python examples/train_moe.py --num-processes 4 --dense    # the same model and batches in one process

Both print the loss of each step; the curves are equal but for rounding, and each is the same bit for bit from run
to run. Try it with a slow rank, and see it named:

    DEEP_EP_DIAGNOSE=sync:20 DEEP_EP_INJECT=slow-rank=2:20ms python examples/train_moe.py --num-processes 4

What `deep_ep` adds to a training script stands in `MoEBlock` and `make_buffer`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional

import deep_ep
from deep_ep import moe

Tensor = torch.Tensor

VOCABULARY, LENGTH, HIDDEN, HEADS, INNER = 32, 32, 128, 4, 256
LAYERS, EXPERTS, TOPK = 2, 8, 2
SEQUENCES_PER_RANK = 4


class Experts(nn.Module):
    """Those of one rank; the weights of expert e are the same wherever it lives."""

    def __init__(self, numbers: range, seed: int) -> None:
        super().__init__()
        up, down = [], []
        for number in numbers:
            generator = torch.Generator().manual_seed(1000 * seed + number)
            up.append(torch.randn(HIDDEN, INNER, generator=generator) * HIDDEN**-0.5)
            down.append(torch.randn(INNER, HIDDEN, generator=generator) * INNER**-0.5)
        self.up, self.down = nn.Parameter(torch.stack(up)), nn.Parameter(torch.stack(down))

    def forward(self, rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        parts = rows.float().split(num_tokens_per_expert.tolist())
        y = [functional.gelu(x @ up) @ down for x, up, down in zip(parts, self.up, self.down)]
        return torch.cat(y).bfloat16()


class MoEBlock(nn.Module):
    """A router, and the experts behind it."""

    def __init__(self, seed: int, buffer: deep_ep.Buffer | None) -> None:
        super().__init__()
        rank, size = (buffer.rank, buffer.group_size) if buffer is not None else (0, 1)
        local = EXPERTS // size
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts(range(rank * local, (rank + 1) * local), seed)
        self.spread = None
        if buffer is not None:
            self.spread = moe.ExpertParallel(self.experts, EXPERTS, buffer, async_combine=True)

    def forward(self, x: Tensor) -> Tensor:
        weights, topk_idx = self.router(x).softmax(-1).topk(TOPK)
        if self.spread is not None:
            return self.spread(x.bfloat16(), topk_idx, weights)
        tokens, y = x.bfloat16().flatten(0, 1), torch.zeros(x.shape[0] * LENGTH, HIDDEN)
        for number in range(EXPERTS):
            rows, entries = (topk_idx.flatten(0, 1) == number).nonzero(as_tuple=True)
            count = torch.tensor([0] * number + [len(rows)] + [0] * (EXPERTS - number - 1))
            out = self.experts(tokens[rows], count).float()
            y = y.index_add(0, rows, out * weights.flatten(0, 1)[rows, entries].unsqueeze(1))
        return y.bfloat16().view(x.shape)


class Layer(nn.Module):
    """Attention and experts, each with a norm before it and a residual around it."""

    def __init__(self, seed: int, buffer: deep_ep.Buffer | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
        self.experts = MoEBlock(seed, buffer)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        normed = self.norms[0](x)
        x = (
            x
            + self.attention(
                normed, normed, normed, attn_mask=mask, is_causal=True, need_weights=False
            )[0]
        )
        return x + self.experts(self.norms[1](x))


class Model(nn.Module):
    """From characters to the scores of the next one."""

    def __init__(self, buffer: deep_ep.Buffer | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Parameter(torch.randn(LENGTH, HIDDEN) * 0.02)
        self.layers = nn.Sequential(*(Layer(seed, buffer) for seed in range(1, LAYERS + 1)))
        self.scores = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        return self.scores(self.layers(self.embedding(text) + self.places))

    def shared(self) -> Iterator[Tensor]:
        """Parameters that every rank has: all but those of experts."""
        for name, parameter in self.named_parameters():
            if not name.endswith((".up", ".down")):
                yield parameter


def make_text(step: int, rank: int) -> Tensor:
    """[sequences, LENGTH + 1]: words that repeat, with a letter wrong now and then."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    size = (SEQUENCES_PER_RANK, 1)
    period = torch.randint(2, 7, size, generator=generator)
    first = torch.randint(VOCABULARY, size, generator=generator)
    text = (first + torch.arange(LENGTH + 1) % period * 3) % VOCABULARY
    wrong = torch.rand(text.shape, generator=generator) < 0.05
    return torch.where(wrong, torch.randint(VOCABULARY, text.shape, generator=generator), text)


def make_buffer(group: dist.ProcessGroup) -> deep_ep.Buffer:
    """Sized for the model, and tried before it is needed."""
    tokens = SEQUENCES_PER_RANK * LENGTH
    needed = deep_ep.sizes(
        hidden=HIDDEN, tokens=tokens, topk=TOPK, experts=EXPERTS, ranks=group.size()
    )
    buffer = deep_ep.Buffer(
        group, needed.num_nvl_bytes, needed.num_rdma_bytes, explicitly_destroy=True
    )
    moe.preflight(buffer)
    return buffer


def train(
    ranks: range, num_steps: int, buffer: deep_ep.Buffer | None, group: dist.ProcessGroup | None
) -> list[float]:
    """The mean loss of all ranks in each step; `ranks`: whose text this process has."""
    size = buffer.group_size if buffer is not None else 1
    model = Model(buffer)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for step in range(num_steps):
        text = torch.cat([make_text(step, rank) for rank in ranks])
        scores = model(text[:, :-1])
        # Each rank's share of the mean, so that gradients of experts, which are sums of all ranks', are right.
        loss = functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()) / size
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if group is not None:
            for parameter in model.shared():
                dist.all_reduce(parameter.grad, group=group)
            dist.all_reduce(total, group=group)
        optimizer.step()
        losses.append(total.item())
        if 0 in ranks:
            print(f"step {step:3}  loss {losses[-1]:.6f}", flush=True)
    return losses


def run_rank(rank: int, size: int, num_steps: int, store: str) -> None:
    """One of several processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = dist.new_group()
    buffer = make_buffer(group)
    train(range(rank, rank + 1), num_steps, buffer, group)
    buffer.destroy()
    dist.destroy_process_group()


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-processes", type=int, default=4, choices=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dense", action="store_true", help="one process, no exchange")
    given = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if given.dense:
        torch.set_num_threads(1)
        train(range(given.num_processes), given.steps, None, None)
        return
    with tempfile.TemporaryDirectory(prefix="deep_ep_train_") as folder:
        arguments = given.num_processes, given.steps, str(Path(folder, "store"))
        mp.spawn(run_rank, arguments, given.num_processes)


if __name__ == "__main__":
    main()
