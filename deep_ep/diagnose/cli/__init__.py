"""The commands of `python -m deep_ep.diagnose`."""
