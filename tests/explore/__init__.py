"""A test machine for the protocol: programs drawn from a seed, run in simulated time, against a model.

machine   the ranks of a group in one process: one runs at a time, time is virtual
program   what a seed makes of a group: sizes, pace, and who does what wrong when
normal    normal operations: what is drawn for them, and what they had to return
rank      one rank's way through the program
model     what every call had to return
explorer  a seed from beginning to end
damage    one row that is overwritten on its way
"""
