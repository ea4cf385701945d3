"""OpenAI's Agents SDK, with the API of responses and with chats."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from question import Place, Question


def ask(question: Question) -> dict[str, object]:
    return asyncio.run(ask_agents(question))


async def ask_agents(question: Question) -> dict[str, object]:
    set_tracing_disabled(True)
    calls: list[list[object]] = []

    @function_tool
    def get_weather(city: str) -> str:
        "Get the weather of a city."
        calls.append(["get_weather", {"city": city}])
        return question.sky

    def calls_so_far() -> list[list[object]]:
        found = list(calls)
        calls.clear()
        return found

    answers: dict[str, object] = {}
    async with AsyncOpenAI(base_url=question.url, api_key=question.key, max_retries=0) as client:
        for api, kind in {"responses": OpenAIResponsesModel, "chats": OpenAIChatCompletionsModel}.items():
            short = ModelSettings(temperature=0, max_tokens=question.tokens)
            long = ModelSettings(temperature=0, max_tokens=120)
            model = kind(question.model, client)
            talker = Agent(name="talker", model=model, model_settings=short)
            whole = await Runner.run(talker, question.greeting)
            streamed = Runner.run_streamed(talker, question.greeting)
            events = [event async for event in streamed.stream_events() if event.type == "raw_response_event"]
            answers[f"greeting/{api}"] = whole.final_output
            answers[f"greeting/{api} stream"] = "".join(
                event.data.delta for event in events if event.data.type == "response.output_text.delta"
            )
            forecaster = Agent(name="forecaster", model=model, tools=[get_weather], model_settings=long)
            whole = await Runner.run(forecaster, question.weather)
            answers[f"tools/{api}"] = calls_so_far()
            answers[f"result/{api}"] = whole.final_output
            streamed = Runner.run_streamed(forecaster, question.weather)
            async for _ in streamed.stream_events():
                pass
            answers[f"tools/{api} stream"] = calls_so_far()
            answers[f"result/{api} stream"] = streamed.final_output
            locator = Agent(name="locator", model=model, output_type=Place, model_settings=long)
            answers[f"structured/{api}"] = (await Runner.run(locator, question.prompt)).final_output.city
            unknown = Agent(name="unknown", model=kind("no", client))
            answers[f"unknown model/{api}"] = await failure(unknown, question.prompt)
            answers[f"long prompt/{api}"] = await failure(talker, question.long_prompt)
    return answers


async def failure(agent: Agent, prompt: str) -> str:
    try:
        return f"no error: {await Runner.run(agent, prompt)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    Question.answer_with(ask)
