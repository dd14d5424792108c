"""Traces of the torch profiler: what dispatch and combine take in them, alone and between ranks."""
