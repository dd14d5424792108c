"""One rank's way through a program: it dispatches and combines, and begins again after an error."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import deep_ep
from deep_ep.errors import EPArgumentError, EPError
from exchange import Inputs, Mode, Received, Shape, begin_dispatch, experts, make_routing
from explore import normal
from explore.machine import NEVER, Machine, SimulatedGroup
from explore.model import Model, Record
from explore.program import TIMEOUT_NS, TIMEOUT_S, Disturbance, Program
from normal_exchange import finish, run_combine, run_dispatch, timing

# After the last disturbance of an episode: operations until all ranks are in step again, and how many
# must then succeed.
RECOVERY = 12
GOOD = 6


class Disturbed(NamedTuple):
    """What this rank did or suffered, and when it began."""

    name: str  # of DISTURBANCES
    began_ns: int
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
        self.settled: list[range] = []  # operations of each episode that must succeed
        self._num_inputs = 0
        self._was_normal = False  # the last round
        self._older: dict[normal.Sizes, tuple[Any, ...]] = {}  # handles of the round before
        self._slowed: int | None = (
            None  # the rank to which this one's path is slow for an operation
        )

    def run(self) -> None:
        """Until the end of the program, or until this rank dies."""
        self._make_buffer()
        for episode, disturbances in enumerate(self.program.disturbances):
            first = self._meet(f"episode {episode}")
            self.disturbances = [
                Disturbance(**{**vars(one), "op": first + one.op})
                for one in disturbances
                if one.rank == self.rank
            ]
            self._exchange_until(first + self.program.episode_length)
            if self._slowed is not None:
                self._slow_path(self._slowed, 0)
            self.machine.stop_after(NEVER, 0)
            self.machine.die_after(NEVER)
            self.disturbances = []
            target = self._meet(f"recovery {episode}") + RECOVERY
            if len(self.machine.gone) == 0:
                self._exchange_until(target, meets=False)
                self.settled.append(range(target - GOOD, target))

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
            op = self._operation() + 1
            call = self.program.call(op)
            if call.normal is not None:
                self._exchange_normal(op, call.normal, call.then)
                continue
            if meets and (call.meets_before or self._was_normal):
                self._clean(call.sizes)
            self._was_normal = False
            received = self._dispatch(op, self._sizes_of(op))
            if received is None:
                continue
            for number in range(call.num_combines):
                if self._disturb("skip", self._operation() + 1) is not None:
                    break
                if not self._combine(received, op, number):
                    break

    def _exchange_normal(self, op: int, sizes: normal.Sizes, then: tuple[str, ...]) -> None:
        self._was_normal = True
        if self._disturb("sizes", op) is not None:
            sizes = self.draw.choice(self.program.normal_sizes)
        older, handle = self._older.get(sizes), self._normal_dispatch(op, sizes)
        if handle is None:
            return
        self._older[sizes] = handle
        for kind in then:
            next_op = self._operation() + 1
            if self._disturb("skip", next_op) is not None:
                return
            handle_of, used = op, handle
            if older is not None and self._disturb("lie", next_op) is not None:
                handle_of, used = -1, older
            if not self._use(kind, sizes, handle_of, used):
                return

    def _normal_dispatch(self, op: int, sizes: normal.Sizes) -> tuple[Any, ...] | None:
        inputs = normal.inputs_of(sizes, self.rank, self._seed())
        self._prepare(op)
        record = self._record(op, "normal dispatch", sizes, inputs)
        config = deep_ep.Config(*sizes.config)

        def call() -> Any:
            return run_dispatch(self.buffer, inputs, sizes.shape, sizes.mode, config)[1]

        result = self._recorded(record, call)
        return None if result is None else result[4]

    def _use(self, kind: str, sizes: normal.Sizes, handle_of: int, handle: tuple[Any, ...]) -> bool:
        """A cached dispatch or a combine. Whether it succeeded."""
        op = self._operation() + 1
        config = deep_ep.Config(*sizes.config)
        seed = self._seed()
        self._prepare(op)
        if kind == "cached dispatch":
            inputs = normal.inputs_of(sizes, self.rank, seed)
            record = self._record(op, kind, sizes, inputs, handle_of)

            def call() -> Any:
                timed = timing(self.buffer, sizes.mode)
                *result, event = self.buffer.dispatch(
                    inputs.cached_x, handle=handle, config=config, **timed
                )
                finish(event, sizes.mode)
                return result[0]
        else:
            inputs = normal.inputs_of(sizes, self.rank, seed)
            rows = normal.Rows(sizes, normal.num_rows_of(handle), seed)
            record = self._record(op, kind, sizes, inputs, handle_of)
            record.ys = rows

            def call() -> Any:
                y, weights, mode = rows.y, rows.weights, sizes.mode
                return run_combine(self.buffer, y, handle, inputs.biases, weights, mode, config)

        return self._recorded(record, call) is not None

    def _record(
        self, op: int, kind: str, sizes: normal.Sizes, inputs: Any, handle_of: int = 0
    ) -> Record:
        now_ns = self.machine.now_ns()
        return Record(self.rank, op, kind, sizes, Mode(), inputs, now_ns, handle_of)

    def _seed(self) -> int:
        """Another one for each call of each rank."""
        self._num_inputs += 1
        return (self.program.seed * 64 + self.rank) * 4096 + self._num_inputs

    def _pause(self) -> None:
        self.machine.sleep(self.draw.randrange(self.setting.longest_pause_ns + 1) + 1)

    def _disturb(self, name: str, op: int) -> Disturbance | None:
        """The next disturbance of this name, if it is due; it comes once."""
        for one in self.disturbances:
            if one.name == name and op >= one.op:
                self.disturbances.remove(one)
                ranks = (self.rank, self._other(one)) if name == "link" else (self.rank,)
                self.disturbed.append(Disturbed(name, self.machine.now_ns(), ranks))
                return one
        return None

    def _other(self, link: Disturbance) -> int:
        """To whom a path is slow."""
        num_ranks = self.program.num_ranks
        return (self.rank + 1 + link.points % (num_ranks - 1)) % num_ranks

    def _prepare(self, op: int) -> None:
        """Between two calls: pauses, and what this rank will suffer in the next."""
        self._pause()
        if self._slowed is not None:
            self._slow_path(self._slowed, 0)
            self._slowed = None
        link = self._disturb("link", op)
        if link is not None:
            self._slowed = self._other(link)
            self._slow_path(self._slowed, link.pause_ns)
        late = self._disturb("late", op)
        if late is not None:
            self.machine.sleep(late.pause_ns)
        stop = self._disturb("stop", op) or self._disturb("pause", op)
        if stop is not None:
            self.machine.stop_after(stop.points, stop.pause_ns)
        death = self._disturb("die", op)
        if death is not None:
            self.machine.die_after(death.points)

    def _sizes_of(self, op: int) -> Shape:
        sizes = self.program.call(op).sizes
        if self._disturb("sizes", op) is None:
            return sizes
        others = [one for one in self.program.sizes if one != sizes]
        if others:
            return self.draw.choice(others)
        if sizes.num_max_tokens == 1:
            return sizes
        fewer = sizes.num_max_tokens - 1
        tokens = tuple(min(fewer, one) for one in sizes.num_tokens)
        return Shape(**{**vars(sizes), "num_max_tokens": fewer, "num_tokens": tokens})

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

    def _dispatch(self, op: int, sizes: Shape) -> Received | None:
        mode = self.program.call(op).dispatch
        inputs = self._make_inputs(sizes)
        self._prepare(op)
        record = Record(self.rank, op, "dispatch", sizes, mode, inputs, self.machine.now_ns())

        def call() -> Any:
            received, event, hook = begin_dispatch(self.buffer, inputs, sizes, mode)
            self._receive(mode, event, hook, op)
            return received

        return self._recorded(record, call)

    def _combine(self, received: Received, handle_of: int, number: int) -> bool:
        given = self.program.call(handle_of)
        dispatch = self.model.records[handle_of][self.rank]
        op = self._operation() + 1
        mode = given.combine
        sizes = dispatch.sizes
        assert isinstance(sizes, Shape)
        # Two combines of one dispatch return different rows.
        ys = [rows * (1 + number) for rows in experts(received, self.rank)]
        inputs, handle = dispatch.inputs, received.handle
        lie = self._disturb("lie", op)
        what = ""
        if lie is not None:
            inputs, handle, what = change(self.draw, lie.what, inputs, received, sizes)
        num_local_experts, num_rows = received.handle[0].shape
        x = torch.full((num_local_experts, num_rows, sizes.hidden), torch.nan).bfloat16()
        self._prepare(op)
        record = Record(
            self.rank,
            op,
            "combine",
            sizes,
            mode,
            inputs,
            self.machine.now_ns(),
            handle_of,
            ys,
            what,
        )

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
            self._receive(mode, event, hook, op)
            return combined

        return self._recorded(record, call) is not None

    def _receive(self, mode: Mode, event: Any, hook: Callable[[], None] | None, op: int) -> None:
        if mode.async_finish:
            event.current_stream_wait()
        if not mode.hook:
            return
        assert hook is not None
        if self._disturb("hook", op) is not None:
            self.buffer.abandon_hook()  # type: ignore[attr-defined]
            raise HookLost("the program lost the hook")
        self._pause()
        copy = self._disturb("copy", op)
        if copy is not None:
            self.machine.sleep(TIMEOUT_NS // 10)  # all rows are there by then
            self.machine.stop_after(copy.points % 64, copy.pause_ns)
        hook()

    def _recorded(self, record: Record, call: Callable[[], Any]) -> Any:
        self.model.add(record)
        try:
            record.result = call()
        except BaseException as error:
            record.error = error
            if not isinstance(error, EPError):
                raise
        finally:
            record.ended_ns = self.machine.now_ns()
        if isinstance(record.error, EPArgumentError) and self._operation() < record.op:
            self.model.withdraw(record)
        return record.result


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
    planes = words[: 2 * src_info.numel()].view(2, *src_info.shape)
    layout_range = layout_range.clone()
    i, row = draw.choice(rows)
    if what == "token":
        planes[0, i, row] += draw.choice((1, 5, 1 << 20))
    elif what == "slot":
        planes[1, i, row] += draw.choice((1, 40, 1 << 20))
    elif what == "negative":
        planes[0, i, row] = -1 - draw.randrange(1 << 20)
    elif what == "begin":
        layout_range[i, draw.randrange(layout_range.shape[1])] += draw.choice((1, 1 << 20)) << 32
    elif what == "count":
        layout_range[i, draw.randrange(layout_range.shape[1])] += draw.choice((1, 7, 1 << 20))
    return inputs, (planes[0], layout_range, *rest), what
