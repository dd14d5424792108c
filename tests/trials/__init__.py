"""Random faults in groups of real processes: what is found out, and what is left.

    make trials ARGS="--trials 300"

Each trial draws a group, a mode and one or two faults from its seed, lets the ranks run into them, and compares
the verdicts and exceptions of the healthy ranks with what was done. `docs/hang.md` has the table.
"""
