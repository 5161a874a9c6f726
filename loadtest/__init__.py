"""Load tests and comparisons, run as modules from the root: `python -m loadtest.load`.

The programs are load, same_file, lossless, speedup, replay, quality, fleet and gpu_check; papers is
one more.
"""
