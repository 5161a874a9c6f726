"""Load tests and comparisons, run as modules from the root: `python -m loadtest.load`.

The tools named compare, concurrency, lossless, load and step_profile speak HTTP to running servers
and import nothing of the server.
"""
