"""The drafters of the papers, as published, with their parameters and defaults."""
