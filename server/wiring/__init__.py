"""The composition root: configuration files become engines, drafters and a served application."""
