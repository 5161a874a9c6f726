"""The routes that generate: names in, shapes out. Each is a Face in a module of its own."""
