"""Pydantic AI, with its models for OpenAI's chats and responses."""

import asyncio

from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from question import Place, Question


def ask(question: Question) -> dict[str, object]:
    return asyncio.run(ask_agents(question))


async def ask_agents(question: Question) -> dict[str, object]:
    calls: list[list[object]] = []

    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        calls.append(["get_weather", {"city": city}])
        return question.sky

    def calls_so_far() -> list[list[object]]:
        found = list(calls)
        calls.clear()
        return found

    short = ModelSettings(temperature=0, max_tokens=question.tokens)
    long = ModelSettings(temperature=0, max_tokens=120)
    answers: dict[str, object] = {}
    async with AsyncOpenAI(base_url=question.url, api_key=question.key, max_retries=0) as client:
        provider = OpenAIProvider(openai_client=client)
        for api, kind in {"chats": OpenAIChatModel, "responses": OpenAIResponsesModel}.items():
            model = kind(question.model, provider=provider)
            talker = Agent(model, model_settings=short)
            whole = await talker.run(question.prompt)
            async with talker.run_stream(question.prompt) as stream:
                text = "".join([delta async for delta in stream.stream_text(delta=True)])
            answers[f"chat/{api}"] = whole.output
            answers[f"chat/{api} stream"] = text
            answers[f"chat usage/{api}"] = usage(whole)
            answers[f"chat usage/{api} stream"] = usage(stream)
            forecaster = Agent(model, tools=[get_weather], model_settings=long)
            answers[f"result/{api}"] = (await forecaster.run(question.weather)).output
            answers[f"tools/{api}"] = calls_so_far()
            async with forecaster.run_stream(question.weather) as stream:
                answers[f"result/{api} stream"] = await stream.get_output()
            answers[f"tools/{api} stream"] = calls_so_far()
            for way in (NativeOutput, ToolOutput):
                locator = Agent(model, output_type=way(Place), model_settings=long)
                answers[f"structured/{api} {way.__name__}"] = (await locator.run(question.prompt)).output.city
            unknown = Agent(kind("no", provider=provider))
            answers[f"unknown model/{api}"] = await failure(unknown, question.prompt)
            answers[f"long prompt/{api}"] = await failure(talker, question.long_prompt)
    return answers


def usage(result: object) -> list[int]:
    counts = result.usage
    return [counts.input_tokens, counts.output_tokens]


async def failure(agent: Agent, prompt: str) -> str:
    try:
        return f"no error: {await agent.run(prompt)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    Question.answer_with(ask)
