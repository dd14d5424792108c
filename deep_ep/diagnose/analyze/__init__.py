"""From matrices to verdicts. Pure: prints nothing, measures nothing."""
