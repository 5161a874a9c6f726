"""Every Prometheus series, declared once, and the names vLLM gives to the same ones."""
