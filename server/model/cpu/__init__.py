"""The CPU runner: compiled kernels that give each row the same bits at every row count."""
