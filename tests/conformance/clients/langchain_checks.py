"""LangChain's OpenAI, ChatOpenAI and decisions classes."""

from __future__ import annotations

from typing import Any

from checks import BASE_URL, MODEL, check, finish
from conversation import QUESTION, TOOL, weather
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

OPTIONS: dict[str, Any] = {
    "model": MODEL,
    "base_url": BASE_URL,
    "api_key": "none",
    "max_retries": 0,
}


class City(BaseModel):
    """What the model is asked for."""

    name: str
    inhabitants: int


@check("langchain OpenAI invoke")
def _() -> None:
    assert OpenAI(max_tokens=5, temperature=0, **OPTIONS).invoke("The capital of France is")


@check("langchain OpenAI generate with logprobs, n and stop")
def _() -> None:
    model = OpenAI(max_tokens=5, n=2, best_of=2, logprobs=2, **OPTIONS)
    result = model.generate(["a b", "c d"], stop=["zzz"])
    assert [len(generations) for generations in result.generations] == [2, 2]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["total_tokens"] > 0


@check("langchain OpenAI stream")
def _() -> None:
    assert "".join(OpenAI(max_tokens=6, temperature=0, **OPTIONS).stream("One, two,"))


@check("langchain OpenAI ainvoke")
async def _() -> None:
    assert await OpenAI(max_tokens=3, **OPTIONS).ainvoke("Hello")


@check("langchain ChatOpenAI invoke")
def _() -> None:
    answer = ChatOpenAI(max_tokens=8, **OPTIONS).invoke("Say hello.")
    assert answer.content and answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


@check("langchain ChatOpenAI stream")
def _() -> None:
    model = ChatOpenAI(max_tokens=8, stream_usage=True, **OPTIONS)
    assert "".join(str(chunk.content) for chunk in model.stream("Say hello."))


@check("langchain ChatOpenAI with_structured_output")
def _() -> None:
    model = ChatOpenAI(max_tokens=60, temperature=0, **OPTIONS)
    city = model.with_structured_output(City, method="json_schema").invoke("Name a city.")
    assert isinstance(city, City)


@check("langchain OpenAIDecisions")
def _() -> None:
    from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate, Score

    decisions = OpenAIDecisions(model=MODEL, base_url=BASE_URL, api_key="none")
    answers = decisions.invoke(
        {
            "input": "The parcel came late.",
            "questions": {
                "complains": Predicate(instructions="The customer complains."),
                "about": Choice(
                    instructions="What is it about?", choices={"delivery": None, "price": "money"}
                ),
                "anger": Score(instructions="How angry?", levels=["calm", "annoyed", "furious"]),
            },
        }
    )
    assert 0 <= answers.predicates["complains"].probability <= 1
    assert answers.choices["about"].choice in ("delivery", "price")
    assert 0 <= answers.scores["anger"].score <= 2


@check("langchain two turns with a tool")
def _() -> None:
    model = ChatOpenAI(max_tokens=40, temperature=0, **OPTIONS)
    forced = model.bind_tools([TOOL], tool_choice="required")
    messages: list[Any] = [HumanMessage(QUESTION)]
    answer = forced.invoke(messages)
    [call] = answer.tool_calls
    messages += [answer, ToolMessage(weather(**call["args"]), tool_call_id=call["id"])]
    second = model.bind_tools([TOOL]).invoke(messages)
    assert model.invoke([*messages, second, HumanMessage("Thank you.")]).content is not None


@check("langchain ChatOpenAI through responses")
def _() -> None:
    model = ChatOpenAI(max_tokens=8, use_responses_api=True, **OPTIONS)
    first = model.invoke("Say hello.")
    assert model.invoke([HumanMessage("Say hello."), first, HumanMessage("Again.")]).content


finish()
