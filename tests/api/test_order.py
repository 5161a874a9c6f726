"""What an order decides without a server: context marks, bounds, the model's real context."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from server import token_bytes
from server.api.answer import choices_of
from server.api.bodies import validate
from server.api.faces.completions import CompletionChoice, _ChoiceWriter
from server.api.routes import DetokenizeBody
from server.api.served_model import ServedModel
from server.config import SamplingDefaults, SpeculationConfig, TaskConfig
from server.config.task import ContextMarks
from server.errors import ContextLengthExceededError, InvalidRequestError, TailorError
from server.types import Delta
from tests.api.chat_models import served
from tests.api.live import TABLE, encode
from tests.api.orders import completion, orders
from tests.api.tiny_tokenizers import byte_level_tokenizer

PROMPT = "Answer. <doc>the quick brown fox</doc> Question: who jumps?"


@pytest.mark.parametrize("where", ["task", "body"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_context_marks_become_a_span_of_ids(where: str, as_ids: bool) -> None:
    marks = {"after": "<doc>", "before": "</doc>"}
    task = TaskConfig(
        name="rag",
        speculation=SpeculationConfig(
            context=ContextMarks(**marks) if where == "task" else ContextMarks(after="nowhere")
        ),
    )
    prompt = encode(PROMPT) if as_ids else PROMPT
    body: dict[str, Any] = {} if where == "task" else {"context": marks}
    [request] = completion(orders(task), model="rag", prompt=prompt, **body).requests
    span = request.speculation.context_span
    assert span is not None
    inside = TABLE.join(request.prompt_ids[span[0] : span[1]], skip_special=False).decode()
    assert inside in "the quick brown fox</doc>" and "quick brown fox" in inside


@pytest.mark.parametrize("marks", [{"after": "<x>"}, {"before": "<x>"}, {"after": "jumps?"}])
def test_marks_that_are_not_there_leave_the_whole_prompt(marks: dict[str, str]) -> None:
    [request] = completion(orders(), prompt=PROMPT, context=marks).requests
    assert request.speculation.context_span is None


def test_a_request_without_speculation_has_no_span() -> None:
    body: dict[str, Any] = {"context": {"after": "<doc>"}, "speculation": {"drafter": "off"}}
    [request] = completion(orders(), prompt=PROMPT, **body).requests
    assert (request.speculation.drafter, request.speculation.context_span) == ("off", None)


def test_the_engines_context_counts_when_it_is_smaller() -> None:
    takes = orders()
    assert completion(takes, prompt=[5] * 20, room=24).requests[0].sampling.max_tokens == 4
    with pytest.raises(ContextLengthExceededError, match="24 tokens"):
        completion(takes, prompt=[5] * 20, room=24, max_tokens=5)
    with pytest.raises(ContextLengthExceededError):
        completion(takes, prompt=[5] * 24, room=24)
    echoed = completion(takes, prompt=[5] * 24, room=24, max_tokens=0, echo=True)
    assert echoed.requests[0].sampling.max_tokens == 0


@pytest.mark.parametrize(("model", "is_taken"), [(None, True), ("one", True), ("two", False)])
def test_a_corpus_is_of_the_model_that_runs_the_task(model: str | None, is_taken: bool) -> None:
    """Whether the task names it, or leaves it to the first one."""
    other = TaskConfig(name="other", model=model, speculation=SpeculationConfig(corpus="o.corpus"))
    own = TaskConfig(name="own", speculation=SpeculationConfig(allowed_corpora=("other",)))
    takes = orders(other, own, models=[served("one"), served("two")])
    asked: dict[str, Any] = {"model": "own", "speculation": {"corpus": "other"}}
    if is_taken:
        assert completion(takes, **asked).requests[0].speculation.corpus == "o.corpus"
    else:
        with pytest.raises(InvalidRequestError, match="the corpus of other is for another model"):
            completion(takes, **asked)


def test_where_a_task_holds_off_the_end_a_request_that_does_not_say_so_ends_where_it_must() -> None:
    sampling = SamplingDefaults(min_tokens=8, max_tokens=16, ignore_eos=True)
    takes, form = orders(TaskConfig(name="long", sampling=sampling)), {"regex": "a+"}

    def ends(**body: Any) -> list[tuple[int, bool]]:
        made = completion(takes, room=24, model="long", **body).requests
        return [(one.sampling.min_tokens, one.sampling.ignore_eos) for one in made]

    assert ends() == ends(max_tokens=8) == [(8, True)]
    assert ends(max_tokens=3) == [(3, True)]
    assert ends(prompt=[[5] * 20, [5] * 2]) == [(4, True), (8, True)]
    assert ends(structured_outputs=form) == [(0, False)]
    for field, body in (
        ("min_tokens", {"min_tokens": 4, "max_tokens": 3}),
        ("min_new_tokens", {"min_new_tokens": 4, "structured_outputs": form}),
        ("ignore_eos", {"ignore_eos": True, "structured_outputs": form}),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            ends(**body)
        assert caught.value.param == field


def test_long_texts_are_tokenized_off_the_loop() -> None:
    threads: list[str] = []

    class Watched:
        def __init__(self, tokenizer: Tokenizer) -> None:
            self._tokenizer = tokenizer

        def encode(self, text: str, add_special_tokens: bool) -> Any:
            threads.append(threading.current_thread().name)
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

        def no_truncation(self) -> None: ...

        def no_padding(self) -> None: ...

    watched: Any = Watched(byte_level_tokenizer())
    model = ServedModel("tiny", watched, TABLE, 400, 10_000)
    takes = orders(models=[model])
    completion(takes, prompt="the " * 10)
    completion(takes, prompt="the " * 2000)
    completion(takes, prompt=["the " * 100] * 20)  # long together
    takes.close()
    assert "MainThread" in threads[0]
    assert len(threads) == 22 and all("tokenize" in name for name in threads[1:])


def test_a_text_that_cannot_fit_is_not_tokenized() -> None:
    class Untouched:
        def no_truncation(self) -> None: ...

        def no_padding(self) -> None: ...

    untouched: Any = Untouched()
    takes = orders(models=[ServedModel("tiny", untouched, TABLE, 400, 10_000)])
    with pytest.raises(ContextLengthExceededError, match="at least"):
        completion(takes, prompt="x" * 1_000_000)


def test_truncation_and_padding_of_a_tokenizer_file_are_off() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    model = ServedModel("tiny", tokenizer, TABLE, 400, 256)
    [request] = completion(orders(models=[model]), prompt="the quick brown fox").requests
    assert list(request.prompt_ids) == encode("the quick brown fox")


def test_special_tokens_are_added_unless_refused() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A", pair=None, special_tokens=[("<|user|>", 1)]
    )
    model = ServedModel("tiny", tokenizer, token_bytes.build(tokenizer, 400), 400, 256)
    takes = orders(models=[model])
    assert completion(takes).requests[0].prompt_ids == (1, *encode("the"))
    assert completion(takes, add_special_tokens=False).requests[0].prompt_ids == tuple(
        encode("the")
    )
    assert completion(takes, prompt="").requests[0].prompt_ids == (1,)
    with pytest.raises(InvalidRequestError, match="no tokens"):
        completion(takes, prompt="", add_special_tokens=False)
    echo = completion(takes, echo=True, logprobs=0)
    [[choice]] = choices_of(echo)
    ended = Delta("", 0, (), finish_reason="length")
    shown, _ = _ChoiceWriter(echo, choice).write(CompletionChoice, ended, ())
    assert shown.text == "the" and shown.logprobs.text_offset == [0, 0]


def test_validation_of_a_huge_list_is_quick_and_short() -> None:
    with pytest.raises(TailorError) as caught:
        validate(DetokenizeBody, {"tokens": ["x"] * 200_000})
    assert len(caught.value.message) < 200
