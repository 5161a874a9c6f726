"""The engines as the API sees them: requests go out, Deltas come back, dead engines start again."""
