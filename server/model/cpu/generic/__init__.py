"""The generic path on a CPU: transformers' own forward on our products, attention and KV cache."""
