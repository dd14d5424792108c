"""What is shown of a hang, and where things stand in its picture; no markup."""
