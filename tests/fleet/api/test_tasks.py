"""What tests/api/test_tasks.py says of tasks that reach engines, through a fleet."""

from tests.api.test_tasks import (  # noqa: F401  # collected here, over this folder's engines
    live,
    place,
    test_a_task_learns_from_its_requests_apart_for_each_key,
    test_an_upload_is_drafted_from_at_once_grows_and_goes,
    test_reloads_and_uploads_under_load_lose_nothing,
    test_tasks_are_listed_and_told,
)
