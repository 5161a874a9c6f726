"""The integer kernels: rows of int8 inputs against one panel of quantised weights."""
