"""The API's view of the engines: requests go out, Deltas come back, dead engines start again."""
