"""What becomes of a verdict on the rank that led the inquiry: a line in the log, and dumps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deep_ep.hang import traces, wording
from deep_ep.hang.messages import InquiryVerdict

if TYPE_CHECKING:
    from deep_ep.hang.cause import HangVerdict
    from deep_ep.hang.inquiry import InquiryResult

_log = logging.getLogger("deep_ep")


class Announcer:
    """Of one buffer. One thread at a time."""

    def __init__(self) -> None:
        """Dumps of failed operations go where the environment says now."""
        self._said: list[object] = []
        self._dumps_to = traces.default_folder()

    def announce(self, result: InquiryResult) -> InquiryVerdict:
        """Logs what is new, and writes the dumps that are due.

        Returns:
            What all ranks are to hear.
        """
        said = _essence(result.verdict)
        if said and said != self._said:
            self._said = said
            _log.warning(
                "deep_ep: %s", wording.line(result.verdict), extra={"verdict": result.verdict}
            )
        folders = [*result.dump_to]
        if result.is_final and self._dumps_to is not None:
            folders.append(str(self._dumps_to / result.verdict.buffer))
        dumped = {folder: _dump(folder, result) for folder in dict.fromkeys(folders)}
        return InquiryVerdict(result.verdict, dumped)


def _dump(folder: str, result: InquiryResult) -> tuple[str, ...]:
    """The files that were written; none if that failed."""
    try:
        files = traces.write_dump(folder, result.states, result.verdict)
    except (OSError, ValueError) as error:  # a name that no folder can have is a ValueError
        _log.warning("deep_ep: no dump in %s: %s", folder, error)
        return ()
    else:
        read = "python -m deep_ep.diagnose hang"
        _log.warning("deep_ep: %d files in %s; %s %s", len(files), folder, read, folder)
        return tuple(str(file) for file in files)


def _essence(verdict: HangVerdict) -> list[object]:
    """What makes one verdict another one than the last."""
    return [(c.kind, c.ranks, c.series, c.number, c.paths, c.circle) for c in verdict.causes]
