"""Plain data that is right but for one value: what hostile files and messages are made of."""

from __future__ import annotations

from typing import Any, Callable

from hypothesis import strategies as st


@st.composite
def damaged(draw: st.DrawFn, plain: Any, others: Callable[[Any], st.SearchStrategy[Any]]) -> Any:
    """Plain data of which one value, anywhere in it, is one of the others for it."""
    if not isinstance(plain, (dict, list)) or not plain or draw(st.integers(0, 5)) == 0:
        return draw(others(plain))
    keys = sorted(plain) if isinstance(plain, dict) else range(len(plain))
    key: Any = draw(st.sampled_from(keys))
    copy: Any = plain.copy()
    copy[key] = draw(damaged(plain[key], others))
    return copy
