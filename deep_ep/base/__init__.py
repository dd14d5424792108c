"""What everything stands on: the environment, places of ranks, the table of arguments."""
