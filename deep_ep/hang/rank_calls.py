"""Where a rank is in its operations, read off its ring of calls."""

from __future__ import annotations

from dataclasses import dataclass

from deep_ep.hang.states import Call, RankState

OPERATIONS = "operation"
# The two calls in which ranks wait without a kernel.
CONSTRUCTION, DESTRUCTION = "construction", "destruction"
# A fresh normal dispatch takes two kernels, one behind the other, of one number.
NOTIFY, NORMAL_DISPATCH, NORMAL_COMBINE = "normal_notify", "normal_dispatch", "normal_combine"


@dataclass(frozen=True)
class NumberedCall:
    """A call and its number, which is inferred where its kernel has not entered."""

    number: int
    call: Call

    @property
    def has_entered(self) -> bool:
        """Whether its kernel has."""
        return self.call.number > 0 or self.call.entered_ns > 0

    @property
    def is_pending(self) -> bool:
        """Whether it was called and its kernel has not entered."""
        return not (self.has_entered or self.call.finished_ns or self.call.failed)


def numbered(state: RankState, series: str) -> list[NumberedCall]:
    """The calls of a series, oldest first. Those that failed before they had a number are left out."""
    newest = newest_entered(state, series)
    found: list[NumberedCall] = []
    for call in state.calls:
        if call.series != series:
            continue
        if call.number:
            number = call.number
        elif NumberedCall(0, call).is_pending:
            is_second = call.name == NORMAL_DISPATCH and found and found[-1].call.name == NOTIFY
            number = found[-1].number if is_second else newest + 1
        else:
            continue
        newest = max(newest, number)
        found.append(NumberedCall(number, call))
    return found


def calls_at(state: RankState, series: str, number: int) -> list[NumberedCall]:
    """The calls with this number, in order; empty if they are no longer, or not yet, in the ring."""
    return [call for call in numbered(state, series) if call.number == number]


def newest_entered(state: RankState, series: str) -> int:
    """Number of the newest operation of a series whose kernel has entered; 0: none."""
    newest = [call.number for call in state.calls if call.series == series]
    if series == OPERATIONS:
        newest += [state.closed, state.opened]
    if state.waits is not None and state.waits.series == series:
        newest.append(state.waits.number)
    return max(newest, default=0)


def has_pending(state: RankState) -> bool:
    """Whether the newest call has not entered its kernel."""
    return bool(state.calls) and NumberedCall(0, state.calls[-1]).is_pending


def is_truncated(state: RankState, series: str, number: int) -> bool:
    """Whether the ring may have lost the first call with this number."""
    oldest = numbered(state, series)[:1]
    oldest_call = next((call.call for call in state.calls if call.call), 0)
    return bool(oldest) and oldest[0].number == number and oldest_call > 1


def open_hook(state: RankState) -> int:
    """Operation that has been sent and whose receive hook has not been called; 0: none."""
    for call in reversed(state.calls):
        if call.number and call.number == state.opened and call.series == OPERATIONS:
            return call.number if call.has_hook and not call.receive_called_ns else 0
    return 0
