"""The drafter `auto`: every source in one tree, ranked by calibrated chance."""
