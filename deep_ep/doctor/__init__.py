"""What is wrong with an installation, a machine or a job, before anything is sent: `python -m deep_ep.doctor`.

It runs where nothing else of the package does. No module here imports torch or a native module when it
is imported itself; what does not load is one of the findings.
"""
