"""The native modules: which one runs, its runtime, streams and memory."""
