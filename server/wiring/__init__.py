"""Puts the parts together: configuration files become engines, drafters and a served
application."""
