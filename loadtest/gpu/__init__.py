"""Parts of `python loadtest/gpu_check.py`, each a process of its own. They need torch,
transformers, numpy and numba, none of the web stack."""
