"""The CUDA runner: transformers' body, Triton attention, CUDA graphs. In tests, torch's CPU."""
