"""Where a rank is in its operations, read off its ring of calls."""

from __future__ import annotations

from deep_ep.hang.states import Call, RankState

OPERATIONS = "operation"
# The two calls in which ranks wait without a kernel.
CONSTRUCTION, DESTRUCTION = "construction", "destruction"
# A fresh normal dispatch takes two kernels, one behind the other, of one number.
NOTIFY, NORMAL_DISPATCH, NORMAL_COMBINE = "normal_notify", "normal_dispatch", "normal_combine"


def numbered(state: RankState, series: str) -> list[tuple[int, Call]]:
    """The calls of a series and their numbers, oldest first. Those that failed before they had a number are left out.

    Of a call whose kernel has not entered the number is inferred.
    """
    newest = newest_entered(state, series)
    found: list[tuple[int, Call]] = []
    for call in state.calls:
        if call.series != series:
            continue
        number = call.number
        if call.is_pending:
            is_second = call.name == NORMAL_DISPATCH and found and found[-1][1].name == NOTIFY
            number = found[-1][0] if is_second else newest + 1
        if number:
            newest = max(newest, number)
            found.append((number, call))
    return found


def calls_at(state: RankState, series: str, number: int) -> list[Call]:
    """The calls with this number, in order; empty if they are no longer, or not yet, in the ring."""
    return [call for its, call in numbered(state, series) if its == number]


def newest_entered(state: RankState, series: str) -> int:
    """Number of the newest operation of a series whose kernel has entered; 0: none."""
    newest = [call.number for call in state.calls if call.series == series]
    if series == OPERATIONS:
        newest += [state.closed, state.opened]
    if state.waits is not None and state.waits.series == series:
        newest.append(state.waits.number)
    return max(newest, default=0)


def is_truncated(state: RankState, series: str, number: int) -> bool:
    """Whether the ring may have lost the first call with this number."""
    oldest = next((its for its, _ in numbered(state, series)), 0)
    oldest_call = next((call.call for call in state.calls if call.call), 0)
    return oldest == number and oldest_call > 1


def open_hook(state: RankState) -> int:
    """Operation that has been sent and whose receive hook has not been called; 0: none."""
    for call in reversed(state.calls):
        if call.number and call.number == state.opened and call.series == OPERATIONS:
            return call.number if call.has_hook and not call.receive_called_ns else 0
    return 0
