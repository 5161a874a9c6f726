"""What tests/api/test_completions.py says of all that a Request and a Delta hold, through a
fleet."""

from tests.api.test_completions import (  # noqa: F401  # collected here, over this folder's engines
    engine,
    server,
    test_a_stream_adds_up_to_the_whole_answer,
    test_a_stream_is_the_whole_text,
    test_best_of_returns_the_n_likeliest,
    test_echo_gives_the_prompt_and_its_logprobs,
    test_every_sampling_field_reaches_the_engine,
    test_rejected_drafts_stand_where_they_were_drafted,
    test_speculation_is_reported_only_when_asked,
)
