"""Faults on purpose, and an exchange whose result is known."""
