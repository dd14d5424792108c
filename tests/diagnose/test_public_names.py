"""What programs may use of `deep_ep.diagnose` does not change unseen."""

from __future__ import annotations

import inspect
import re

from deep_ep import diagnose

NAMES = """
COMM_SLOW COMP_SLOW MIXED_SLOW Cause Diagnose Diagnosis History Snapshot Thresholds Verdict attach
diagnose_matrix gather install judge judge_waits read_any report run save snapshot write_picture
"""


def test_public_names_are_these() -> None:
    assert diagnose.__all__ == sorted(NAMES.split(), key=lambda name: (not name.isupper(), name))


def test_every_public_name_is_documented() -> None:
    guide = inspect.getdoc(diagnose) or ""
    for name in diagnose.__all__:
        assert re.search(rf"\b{name}\b", guide), name
        assert name.isupper() or inspect.getdoc(getattr(diagnose, name)), name
