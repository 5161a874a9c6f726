"""Tailor's server: an OpenAI-compatible inference server for small models that do tasks."""

__version__ = "0.1.0"
