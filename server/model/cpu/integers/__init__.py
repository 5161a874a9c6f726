"""Products of integers: quantised weights, int8 activations, exact int32 sums."""
