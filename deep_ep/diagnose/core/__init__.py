"""Plain data and arithmetic that every other room uses."""
