"""Tailor as a client of a running server: `tailor run` and `tailor complete`."""
