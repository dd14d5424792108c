"""How a buffer comes to be, and its operations."""
