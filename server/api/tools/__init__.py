"""Tool calls in a model's text: found, read and checked against their schemas."""
