"""One rank's way through a program: it dispatches and combines, and begins again after an error.

A program is either free: ranks run ahead of each other, and what an operation exchanges follows from its
number. Or it has steps: ranks meet between them, and what they exchange follows from the step.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import deep_ep
from deep_ep.errors import EPError
from explore import normal
from explore.machine import NEVER, Machine, SimulatedGroup
from explore.model import Model, Record
from explore.program import TIMEOUT_NS, TIMEOUT_S, Call, Disturbance, Program
from support.exchange import Inputs, Mode, Received, Shape, begin_dispatch, experts, make_routing
from support.normal_exchange import finish, run_combine, run_dispatch, timing

# After the last disturbance of an episode: operations until all ranks are in step again, and how many
# must then succeed.
RECOVERY = 12
GOOD = 6


class Disturbed(NamedTuple):
    """What this rank did or suffered, and when it began."""

    name: str  # of DISTURBANCES
    began_ns: int
    number: int  # of the operation, or of the step
    ranks: tuple[int, ...]  # that may be named for it


class Rank:
    """The program of one rank; `run()` is what its thread executes."""

    def __init__(self, program: Program, machine: Machine, model: Model, rank: int) -> None:
        self.program = program
        self.machine = machine
        self.model = model
        self.rank = rank
        self.setting = program.ranks[rank]
        self.draw = random.Random(program.seed * 101 + rank)
        self.buffer: deep_ep.Buffer = None  # type: ignore[assignment]
        self.disturbances: list[Disturbance] = []
        self.disturbed: list[Disturbed] = []
        self.settled: list[range] = []  # operations that must succeed
        self.steps: list[list[int]] = []  # operations of each step
        self._num_inputs = 0
        self._was_normal = False  # the last round
        self._older: dict[normal.Sizes, Record] = {}  # dispatches of the round before
        self._step: int | None = None  # of a program that has steps
        # The rank to which this one's path is slow for an operation, and when all that was sent then has come.
        self._slowed: int | None = None
        self._path_is_slow_until_ns = 0

    def run(self) -> None:
        """Until the end of the program, or until this rank dies."""
        self._make_buffer()
        for episode, disturbances in enumerate(self.program.disturbances):
            first = self._meet(f"episode {episode}")
            self._expect(disturbances, first)
            self._exchange_until(first + self.program.episode_length)
            self._expect((), 0)
            self.machine.stop_after(NEVER, 0)
            self.machine.die_after(NEVER)
            target = self._meet(f"recovery {episode}") + RECOVERY
            if len(self.machine.gone) == 0:
                self._exchange_until(target, meets=False)
                self.settled.append(range(target - GOOD, target))

    def run_steps(self) -> None:
        """A step for each operation of the program's only episode."""
        self._make_buffer()
        (disturbances,) = self.program.disturbances
        self._expect(disturbances, 0)
        for step in range(self.program.episode_length):
            self.machine.meet(f"step {step}", 0, self.rank, None)
            # What a program says to its ranks is no faster than what kernels say.
            self.machine.sleep(self.program.slowest_delivery_ns)
            self._step = step
            before = len(self.model.calls_of(self.rank))
            if self._disturb("leave") is None:
                self._exchange()
            self.machine.stop_after(NEVER, 0)
            # A fault has ended before the next step begins: what a slow path held up has come.
            self.machine.sleep(max(1, self._path_is_slow_until_ns - self.machine.now_ns()))
            self.steps.append([record.op for record in self.model.calls_of(self.rank)[before:]])

    def _expect(self, disturbances: Iterable[Disturbance], first: int) -> None:
        """What this rank will suffer or do, counted from operation `first` on."""
        self.disturbances = [
            replace(one, op=first + one.op) for one in disturbances if one.rank == self.rank
        ]
        self._heal_path()

    def _meet(self, name: str) -> int:
        """The newest operation of any rank."""
        return max(self.machine.meet(name, 0, self.rank, self._operation()).values())

    def _operation(self) -> int:
        assert self.buffer.runtime is not None
        return int(self.buffer.runtime.native.operation())

    def _make_buffer(self) -> None:
        program, setting = self.program, self.setting
        size = max(
            deep_ep.Buffer.get_low_latency_rdma_size_hint(
                one.num_max_tokens, one.hidden, program.num_ranks, one.num_experts
            )
            for one in program.sizes
        )
        hints = [one.buffer_bytes() for one in program.normal_sizes]
        channels = [one.config[0] for one in program.normal_sizes]
        self.buffer = deep_ep.Buffer(
            SimulatedGroup(self.machine, self.rank, TIMEOUT_S),
            num_nvl_bytes=max((nvl for nvl, _ in hints), default=0),
            num_rdma_bytes=max(size, *(rdma for _, rdma in hints)) if hints else size,
            low_latency_mode=True,
            num_qps_per_rank=max(*channels, *(one.num_local_experts for one in program.sizes), 1),
        )
        assert self.buffer.runtime is not None
        native = self.buffer.runtime.native
        blocks, warps = setting.launch_shape
        native.set_launch_shape(blocks=blocks, warps=warps)
        if setting.schedule_seed is not None:
            native.set_schedule(policy="random", seed=setting.schedule_seed)
        native.set_clock_fault(offset_ns=setting.clock_offset_ns, drift_ppm=setting.clock_drift_ppm)
        if setting.slow_path is not None:
            self._slow_path(*setting.slow_path)
        if setting.counts:
            self.buffer.enable_counters()

    def _slow_path(self, dst: int, delay_ns: int) -> None:
        assert self.buffer.runtime is not None
        self.buffer.runtime.native.set_path_fault(dst=dst, delay_ns=delay_ns, bytes_per_s=0.0)

    # ---- operations

    def _exchange_until(self, target: int, meets: bool = True) -> None:
        while self._operation() < target:
            call = self.program.call(self._number())
            if meets and call.normal is None and (call.meets_before or self._was_normal):
                self._clean(call.sizes)
            self._exchange()

    def _number(self) -> int:
        """What says what is exchanged next, and who is disturbed: the step, or else the operation."""
        return self._operation() + 1 if self._step is None else self._step

    def _exchange(self) -> None:
        call = self.program.call(self._number())
        self._was_normal = call.normal is not None
        if call.normal is not None:
            return self._exchange_normal(call.normal, call.then)
        dispatch = self._dispatch(call, self._sizes_of(call))
        if dispatch.error is not None:
            return None
        for number in range(call.num_combines):
            if self._disturb("skip") is not None:
                break
            if self._combine(dispatch, call.combine, number).error is not None:
                break
        return None

    def _exchange_normal(self, sizes: normal.Sizes, then: tuple[str, ...]) -> None:
        if self._disturb("sizes") is not None:
            sizes = self.draw.choice(self.program.normal_sizes)
        older, dispatch = self._older.get(sizes), self._normal_dispatch(sizes)
        if dispatch.error is not None:
            return
        self._older[sizes] = dispatch
        for kind in then:
            if self._disturb("skip") is not None:
                return
            used = dispatch
            if older is not None and self._disturb("lie") is not None:
                used = older
            if self._use(kind, sizes, used).error is not None:
                return

    def _normal_dispatch(self, sizes: normal.Sizes) -> Record:
        inputs = normal.inputs_of(sizes, self.rank, self._seed())
        self._prepare()
        topk_idx = inputs.topk_idx
        if self._disturb("refuse") is not None:
            topk_idx = topk_idx.int()
        config = deep_ep.Config(*sizes.config)

        def call() -> Any:
            given = inputs._replace(topk_idx=topk_idx)
            return run_dispatch(self.buffer, given, sizes.shape, sizes.mode, config)[1]

        return self._recorded(self._record("normal dispatch", sizes, inputs), call)

    def _use(self, kind: str, sizes: normal.Sizes, dispatch: Record) -> Record:
        """A cached dispatch or a combine, with the handle of a dispatch."""
        config = deep_ep.Config(*sizes.config)
        seed = self._seed()
        handle = dispatch.result[4]
        self._prepare()
        inputs = normal.inputs_of(sizes, self.rank, seed)
        record = self._record(kind, sizes, inputs, dispatch.op)
        if kind == "cached dispatch":

            def call() -> Any:
                timed = timing(self.buffer, sizes.mode)
                *result, event = self.buffer.dispatch(
                    inputs.cached_x, handle=handle, config=config, **timed
                )
                finish(event, sizes.mode)
                return result[0]
        else:
            rows = normal.Rows(sizes, normal.num_rows_of(handle), seed)
            record.ys = rows

            def call() -> Any:
                y, weights, mode = rows.y, rows.weights, sizes.mode
                return run_combine(self.buffer, y, handle, inputs.biases, weights, mode, config)

        return self._recorded(record, call)

    def _record(self, kind: str, sizes: normal.Sizes, inputs: Any, handle_of: int = 0) -> Record:
        return Record(self.rank, kind, sizes, Mode(), inputs, self.machine.now_ns(), handle_of)

    def _seed(self) -> int:
        """Another one for each call of each rank."""
        self._num_inputs += 1
        return (self.program.seed * 64 + self.rank) * 4096 + self._num_inputs

    def _pause(self) -> None:
        self.machine.sleep(self.draw.randrange(self.setting.longest_pause_ns + 1) + 1)

    def _disturb(self, name: str) -> Disturbance | None:
        """The next disturbance of this name, if it is due; it comes once."""
        for one in self.disturbances:
            if one.name == name and self._number() >= one.op:
                self.disturbances.remove(one)
                ranks = (self.rank, self._other(one)) if name == "link" else (self.rank,)
                self.disturbed.append(Disturbed(name, self.machine.now_ns(), self._number(), ranks))
                return one
        return None

    def _other(self, link: Disturbance) -> int:
        """To whom a path is slow."""
        num_ranks = self.program.num_ranks
        return (self.rank + 1 + link.points % (num_ranks - 1)) % num_ranks

    def _prepare(self) -> None:
        """Between two calls: pauses, and what this rank will suffer in the next."""
        self._pause()
        self._heal_path()
        link = self._disturb("link")
        if link is not None:
            self._slowed = self._other(link)
            self._slow_path(self._slowed, link.pause_ns)
            self._path_is_slow_until_ns = self.machine.now_ns() + link.pause_ns + TIMEOUT_NS
        late = self._disturb("late")
        if late is not None:
            self.machine.sleep(late.pause_ns)
        stop = self._disturb("stop") or self._disturb("pause")
        if stop is not None:
            self.machine.stop_after(stop.points, stop.pause_ns)
        death = self._disturb("die")
        if death is not None:
            self.machine.die_after(death.points)

    def _heal_path(self) -> None:
        if self._slowed is not None:
            self._slow_path(self._slowed, 0)
            self._slowed = None

    def _sizes_of(self, call: Call) -> Shape:
        sizes = call.sizes
        if self._disturb("sizes") is None:
            return sizes
        others = [one for one in self.program.sizes if one != sizes]
        if others:
            return self.draw.choice(others)
        if sizes.num_max_tokens == 1:
            return sizes
        fewer = sizes.num_max_tokens - 1
        tokens = tuple(min(fewer, one) for one in sizes.num_tokens)
        return replace(sizes, num_max_tokens=fewer, num_tokens=tokens)

    def _clean(self, sizes: Shape) -> None:
        # Who is behind the others meets them in a later one.
        with contextlib.suppress(EPError):
            self.buffer.clean_low_latency_buffer(
                sizes.num_max_tokens, sizes.hidden, sizes.num_experts
            )

    def _make_inputs(self, sizes: Shape) -> Inputs:
        generator = torch.Generator().manual_seed(self._seed())
        num_tokens = sizes.num_tokens[self.rank]
        x = torch.randn(num_tokens, sizes.hidden, generator=generator).bfloat16()
        return Inputs(x, *make_routing(sizes, num_tokens, generator))

    def _dispatch(self, called: Call, sizes: Shape) -> Record:
        mode = called.dispatch
        inputs = self._make_inputs(sizes)
        self._prepare()
        given = inputs
        if self._disturb("refuse") is not None:
            given = inputs._replace(topk_idx=inputs.topk_idx.int())
        record = Record(self.rank, "dispatch", sizes, mode, inputs, self.machine.now_ns())

        def call() -> Any:
            received, event, hook = begin_dispatch(self.buffer, given, sizes, mode)
            self._receive(mode, event, hook)
            return received

        return self._recorded(record, call)

    def _combine(self, dispatch: Record, mode: Mode, number: int) -> Record:
        """The dispatch's rows go back; `number` counts its combines."""
        sizes, received = dispatch.sizes, dispatch.result
        assert isinstance(sizes, Shape)
        # Two combines of one dispatch return different rows.
        ys = [rows * (1 + number) for rows in experts(received, self.rank)]
        inputs, handle = dispatch.inputs, received.handle
        lie = self._disturb("lie")
        what = ""
        if lie is not None:
            inputs, handle, what = change(self.draw, lie.what, inputs, received, sizes)
        num_local_experts, num_rows = received.handle[0].shape
        x = torch.full((num_local_experts, num_rows, sizes.hidden), torch.nan).bfloat16()
        self._prepare()
        began_ns = self.machine.now_ns()
        record = Record(self.rank, "combine", sizes, mode, inputs, began_ns, dispatch.op, ys, what)

        def call() -> torch.Tensor:
            target = x
            if mode.zero_copy:
                target = self.buffer.get_next_low_latency_combine_buffer(handle)
            for i, rows in enumerate(ys):
                target[i, : len(rows)] = rows
            combined, event, hook = self.buffer.low_latency_combine(
                x,
                inputs.topk_idx,
                inputs.topk_weights,
                handle,
                use_logfmt=mode.use_logfmt,
                zero_copy=mode.zero_copy,
                async_finish=mode.async_finish,
                return_recv_hook=mode.hook,
                out=torch.full_like(inputs.x, torch.nan) if mode.use_out else None,
            )
            self._receive(mode, event, hook)
            return combined

        return self._recorded(record, call)

    def _receive(self, mode: Mode, event: Any, hook: Callable[[], None] | None) -> None:
        if mode.async_finish:
            event.current_stream_wait()
        if not mode.hook:
            return
        assert hook is not None
        if self._disturb("hook") is not None:
            self.buffer.abandon_hook()  # type: ignore[attr-defined]
            raise HookLost("the program lost the hook")
        self._pause()
        copy = self._disturb("copy")
        if copy is not None:
            self.machine.sleep(TIMEOUT_NS // 10)  # all rows are there by then
            self.machine.stop_after(copy.points % 64, copy.pause_ns)
        hook()

    def _recorded(self, record: Record, call: Callable[[], Any]) -> Record:
        """Makes the call; what it returned or raised is in its record, and the number it had."""
        self.model.begin(record)
        before = self._entered()
        try:
            record.result = call()
        except BaseException as error:
            record.error = error
            if not isinstance(error, EPError):
                raise
        finally:
            record.ended_ns = self.machine.now_ns()
            if self._entered() > before:  # else it was refused before it became an operation
                self.model.number(record, self._entered())
        return record

    def _entered(self) -> int:
        assert self.buffer.runtime is not None
        return int(self.buffer.runtime.native.entered_operation())


class HookLost(EPError):
    """The program dropped its hook."""


def change(
    draw: random.Random, what: str, inputs: Inputs, received: Received, sizes: Shape
) -> tuple[Inputs, tuple[Any, ...], str]:
    """Inputs and handle of a combine with one value changed, and what was; "" if there is none."""
    src_info, layout_range, *rest = received.handle
    rows = [(i, row) for i, n in enumerate(received.recv_count.tolist()) for row in range(n)]
    if what == "expert":
        chosen = (inputs.topk_idx >= 0).nonzero().tolist()
        if not chosen or sizes.num_experts < 2:
            return inputs, received.handle, ""
        token, slot = draw.choice(chosen)
        topk_idx = inputs.topk_idx.clone()
        topk_idx[token, slot] = (topk_idx[token, slot] + 1) % sizes.num_experts
        return inputs._replace(topk_idx=topk_idx), received.handle, what
    if not rows:
        return inputs, received.handle, ""
    # Behind src_info, in its storage, lies what the program does not see; a copy has to have it as well.
    storage = src_info.untyped_storage().clone()
    first = src_info.storage_offset()
    words = torch.empty(0, dtype=torch.int32).set_(storage)[first:]
    tokens = words[: src_info.numel()].view(src_info.shape)
    num_entry_words = 2 * inputs.topk_idx.numel()
    received_counts, entries = words[-num_entry_words - sizes.num_experts :].split(
        [sizes.num_experts, num_entry_words]
    )
    layout_range = layout_range.clone()
    i, row = draw.choice(rows)
    if what == "token":
        tokens[i, row] += draw.choice((1, 5, 1 << 20))
    elif what == "negative":
        # Of the last source, so that no range behind it begins elsewhere.
        begin = int(layout_range[i, -1]) >> 32
        if begin < 2:
            return inputs, received.handle, ""
        count = -draw.randrange(2, begin + 1)
        layout_range[i, -1] = begin << 32 | count & 0xFFFFFFFF
        received_counts.view(layout_range.shape)[i, -1] = count
    elif what == "place":
        sent = (inputs.topk_idx.flatten() >= 0).nonzero().flatten().tolist()
        if not sent:
            return inputs, received.handle, ""
        entries.view(-1, 2)[draw.choice(sent), 1] += draw.choice((1, 40, 1 << 20))
    elif what == "begin":
        layout_range[i, draw.randrange(layout_range.shape[1])] += draw.choice((1, 1 << 20)) << 32
    elif what == "count":
        layout_range[i, draw.randrange(layout_range.shape[1])] += draw.choice((1, 7, 1 << 20))
    # Tokens are the program's: combine does not read them.
    return inputs, (tokens, layout_range, *rest), "" if what == "token" else what
