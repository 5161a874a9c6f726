"""What of tests/api/test_tasks.py engines take part in, through a fleet."""

# ruff: noqa: F401

from tests.api.test_tasks import (
    calm,
    calm_place,
    live,
    mended,
    place,
    test_a_damaged_corpus_is_named_with_its_task_set_aside_and_harms_nobody,
    test_a_reload_changes_what_new_requests_get,
    test_a_task_learns_from_its_requests_apart_for_each_key,
    test_an_upload_is_drafted_from_at_once_grows_and_goes,
    test_options_of_a_request_go_over_the_task_s,
    test_reloads_and_uploads_under_load_lose_nothing,
    test_tasks_are_listed_and_told,
)
