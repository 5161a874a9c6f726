"""What was learned travels: engines append segments to a storage, builders publish what they make.

storage.py holds bytes under names; exchange.py is an engine's side, builder.py the other. Nothing
here is on the way of a request: a segment that is late, torn or lost costs speed and never changes
text.
"""
