"""Diagnoses as text, pages, pictures and metrics."""
