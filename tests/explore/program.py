"""What a seed makes of a group: its size, its pace, what is exchanged, and who does what wrong when.

What an operation exchanges follows from its number, so ranks that are in step agree, however often they
had to begin again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from explore import normal
from support.exchange import Mode, Shape

MS = 1_000_000
TIMEOUT_S = 0.1  # virtual
TIMEOUT_NS = round(TIMEOUT_S * 1e9)

# Disturbances: what one rank does or suffers. All but the first let operations fail, on all ranks.
#   pause  it stands still at some point of an operation, for less than the others' patience
#   stop   it stands still at some point of an operation, longer than the others wait
#   copy   the same while it copies what it has received, at its next hook
#   link   what it sends to another rank in one operation takes longer than that
#   late   it comes to an operation later than that
#   sizes  it alone calls with other sizes
#   skip   it dispatches where the others combine
#   hook   it loses its receive hook; in low latency
#   lie    it combines with values changed in its handle, or with another topk_idx; in normal operations
#          with the handle of an earlier dispatch
#   die    its process dies at some point of an operation; the program ends with it
#   leave  in programs with steps: it leaves a step out
#   refuse in programs with steps: it passes what is refused before anything is sent, so it leaves the rest out
LEFT_OUT = ("leave", "refuse")
DISTURBANCES = (
    *("pause", "stop", "copy", "link", "late", "sizes", "skip", "hook", "lie", "die"),
    *LEFT_OUT,
)
# What `lie` can change: in the handle the token or the place of a row, the first row or the number of rows of a
# source, a number to one below zero in the hidden record, too; the expert of an entry of topk_idx.
LIES = ("token", "place", "begin", "count", "negative", "expert")


@dataclass(frozen=True)
class Pace:
    """How the simulation runs; see simulation.h."""

    points_per_step: int
    step_ns: int
    shortest_delivery_ns: int
    longest_delivery_ns: int


@dataclass(frozen=True)
class Disturbance:
    """What happens to `rank` when its next operation has at least this number."""

    name: str  # of DISTURBANCES
    rank: int
    op: int
    points: int  # of the executor, until it stops or dies
    pause_ns: int
    what: str = ""


@dataclass(frozen=True)
class RankSetting:
    """How one rank is set up."""

    launch_shape: tuple[int, int]
    schedule_seed: int | None
    clock_offset_ns: int
    clock_drift_ppm: float
    counts: bool
    longest_pause_ns: int  # between its calls
    slow_path: tuple[int, int] | None  # to this rank messages take so many nanoseconds longer


@dataclass(frozen=True)
class Call:
    """What one operation's number says about it: of a dispatch, and of what follows it.

    normal: of a normal dispatch; the modes are of a low-latency one. then: names of what comes after it.
    """

    sizes: Shape
    dispatch: Mode
    combine: Mode
    num_combines: int
    meets_before: bool  # ranks call clean_low_latency_buffer first
    normal: normal.Sizes | None = None
    then: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """Everything that a seed decides. Operations `first_op(e)` .. of episode e."""

    seed: int
    num_ranks: int
    ranks_per_node: int
    pace: Pace
    ranks: tuple[RankSetting, ...]
    sizes: tuple[Shape, ...]
    normal_sizes: tuple[normal.Sizes, ...]  # none: low latency only
    normal_share: float  # of the time
    clock_interval_s: float
    verifies: bool
    num_episodes: int
    episode_length: int
    disturbances: tuple[tuple[Disturbance, ...], ...] = field(default=())  # of each episode

    @property
    def slowest_delivery_ns(self) -> int:
        """How long a message takes at most, unless somebody is disturbed."""
        slow_paths = (one.slow_path[1] for one in self.ranks if one.slow_path is not None)
        return self.pace.longest_delivery_ns + max(slow_paths, default=0)

    def call(self, op: int) -> Call:
        """What the dispatch numbered `op` and its combines are."""
        draw = random.Random(self.seed * 1_000_003 + op)
        # Sizes stay for a while, or change with every dispatch.
        period = random.Random(self.seed * 7 + op // 24).choice((1, 2, 8, 24))
        sizes = random.Random(self.seed * 31 + op // period).choice(self.sizes)
        use_fp8, logfmt = draw.random() < 0.5, draw.random() < 0.2
        hooks = (draw.random() < 0.4, draw.random() < 0.4)
        round_scale = use_fp8 and draw.random() < 0.4
        dispatch = Mode(
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=round_scale and draw.random() < 0.5,
            hook=hooks[0],
            async_finish=not hooks[0] and draw.random() < 0.3,
        )
        combine = Mode(
            use_logfmt=logfmt,
            zero_copy=not logfmt and draw.random() < 0.3,
            hook=hooks[1],
            async_finish=not hooks[1] and draw.random() < 0.3,
            use_out=draw.random() < 0.3,
        )
        num_combines, meets = draw.choice((0, 1, 1, 1, 1, 2)), draw.random() < 0.03
        call = Call(sizes, dispatch, combine, num_combines, meets)
        # So does the mode.
        of_mode = random.Random(self.seed * 57 + op // (2 * period))
        if of_mode.random() >= self.normal_share:
            return call
        return replace(
            call,
            normal=of_mode.choice(self.normal_sizes),
            then=tuple(
                draw.choices(("cached dispatch", *2 * ("normal combine",)), k=draw.randrange(4))
            ),
        )


def draw_program(seed: int, names: tuple[str, ...] = DISTURBANCES) -> Program:
    """The program of a seed, with disturbances of the given names only."""
    draw = random.Random(seed)
    num_ranks = draw.choice((1, 2, 2, 3, 3, 4, 4, 5, 6))
    names = tuple(name for name in names if name not in LEFT_OUT)
    longest_delivery_ns = draw.choice((1_000, 10_000, 100_000, 2 * MS))
    pace = Pace(
        points_per_step=draw.choice((1, 4, 16, 64, 256)),
        step_ns=draw.choice((50, 500, 5_000)),
        shortest_delivery_ns=draw.choice((1, 500, 1_000)),
        longest_delivery_ns=longest_delivery_ns,
    )
    bends_clocks = draw.random() < 0.3
    ranks = tuple(_draw_rank(draw, num_ranks, bends_clocks) for _ in range(num_ranks))
    sizes = tuple(_draw_sizes(draw, num_ranks) for _ in range(draw.choice((1, 2, 3))))
    normal_share = draw.choice((0.0, 0.5, 1.0, 1.0))
    ranks_per_node = draw.choice((1, 2, num_ranks))
    normal_sizes: tuple[normal.Sizes, ...] = ()
    if normal_share > 0:
        # Nodes are equal.
        ranks_per_node = draw.choice([n for n in range(1, num_ranks + 1) if num_ranks % n == 0])
        normal_sizes = tuple(
            normal.draw_sizes(draw, num_ranks, ranks_per_node)
            for _ in range(draw.choice((1, 2, 3)))
        )
    num_episodes = draw.choice((1, 2, 3))
    length = draw.choice((8, 16, 24))
    program = Program(
        seed=seed,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        pace=pace,
        ranks=ranks,
        sizes=sizes,
        normal_sizes=normal_sizes,
        normal_share=normal_share,
        clock_interval_s=draw.choice((0.0, 0.0, 0.001)),
        verifies=draw.random() < 0.5,
        num_episodes=num_episodes,
        episode_length=length,
    )
    disturbances = []
    for episode in range(num_episodes):
        found: list[Disturbance] = []
        if names and num_ranks > 1 and draw.random() < 0.7:
            found = [
                _draw_disturbance(draw, program, names) for _ in range(draw.choice((1, 1, 2, 3)))
            ]
        if episode + 1 < num_episodes:
            found = [one for one in found if one.name != "die"]
        disturbances.append(tuple(found))
    return Program(**{**vars(program), "disturbances": tuple(disturbances)})


def draw_steps(seed: int, names: tuple[str, ...] = DISTURBANCES) -> Program:
    """A program of the same kind whose ranks meet between steps, with one disturbance that leaves all alive."""
    program = draw_program(seed, ())
    draw = random.Random(seed + 1)
    names = tuple(name for name in names if name not in ("pause", "die"))
    program = replace(program, num_episodes=1, episode_length=12)
    found = [_draw_disturbance(draw, program, names)] if names and program.num_ranks > 1 else []
    # Half of what there is to find in the beginning, so that there are steps to recover in.
    found = [replace(one, op=1 + one.op % 6) for one in found]
    return replace(program, disturbances=(tuple(found),))


def _draw_rank(draw: random.Random, num_ranks: int, bends_clocks: bool) -> RankSetting:
    return RankSetting(
        launch_shape=draw.choice(((1, 1), (1, 1), (2, 1), (1, 2), (3, 1))),
        schedule_seed=draw.choice((None, draw.randrange(1 << 30))),
        clock_offset_ns=draw.randrange(-50 * MS, 50 * MS) if bends_clocks else 0,
        clock_drift_ppm=draw.uniform(-20, 20) if bends_clocks else 0.0,
        counts=draw.random() < 0.5,
        longest_pause_ns=draw.choice((0, 1_000, 100_000, 5 * MS)),
        slow_path=draw.choice((None, None, (draw.randrange(num_ranks), draw.randrange(2 * MS)))),
    )


def _draw_sizes(draw: random.Random, num_ranks: int) -> Shape:
    num_max_tokens = draw.choice((1, 2, 3, 4, 5, 6))
    num_experts = num_ranks * draw.choice((1, 1, 2, 3))
    routing = draw.choice(("random", "random", "random", "repeats", "one-expert", "nowhere"))
    return Shape(
        num_tokens=tuple(draw.randint(0, num_max_tokens) for _ in range(num_ranks)),
        num_max_tokens=num_max_tokens,
        hidden=draw.choice((128, 128, 256, 384)),
        num_experts=num_experts,
        num_topk=draw.choice((1, 2, 3)),
        routing=routing,
        dropped=draw.choice((0.0, 0.1, 0.5)),
    )


def _draw_disturbance(draw: random.Random, program: Program, names: tuple[str, ...]) -> Disturbance:
    name = draw.choice(names)
    pause_ns = round(TIMEOUT_NS * draw.choice((0.99, 1.01, 1.5, 3.5))) + draw.randrange(-MS, MS)
    return Disturbance(
        name=name,
        rank=draw.randrange(program.num_ranks),
        op=draw.randrange(program.episode_length),
        points=round(10 ** draw.uniform(0, 3)),
        pause_ns=draw.randrange(TIMEOUT_NS // 4) if name == "pause" else pause_ns,
        what=draw.choice(LIES),
    )
