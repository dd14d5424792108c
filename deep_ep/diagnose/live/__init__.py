"""Diagnosis of a program while it runs."""
