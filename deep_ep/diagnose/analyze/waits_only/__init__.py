"""Verdicts where nothing but sums of waiting is known: `judge.judge_waits`."""
