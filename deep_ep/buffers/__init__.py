"""`deep_ep.buffers`, where later revisions of DeepEP keep their buffer classes."""
