"""How numbers are written for people."""

from __future__ import annotations

import math


def percent(part: float) -> str:
    """0.5 -> "50 %"; close to one is not rounded to certainty."""
    if not math.isfinite(part):
        return "not known"
    if 0.9995 < part < 1:
        return "> 99.9 %"
    return f"{part:.1%}".replace(".0%", "%").replace("%", " %")


def microseconds(us: float) -> str:
    """`512 us`, or `not known`."""
    return f"{number(us)} us" if math.isfinite(us) else "not known"


def number(value: float) -> str:
    """Three to four digits where there is a fraction, all of them where there is none."""
    if not math.isfinite(value):
        return "not known"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 2
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
