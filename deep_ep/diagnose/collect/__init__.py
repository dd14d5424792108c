"""From counters on each rank to matrices of the group."""
