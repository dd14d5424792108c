"""What orders memory in the kernels: the source lines, litmus tests of them, and their machine code.

docs/memory_model.md says what is checked. `tools/litmus.py` and `tools/machine_code.py` are the commands.
"""
