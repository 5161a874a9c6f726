"""Hostile input for every reader: mutated files and bodies, read in processes of their own."""
