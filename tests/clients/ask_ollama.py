"""Every method of the package `ollama` for models on a server. ask_ollama.mjs does the same in JavaScript."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from ollama import AsyncClient, Client, ResponseError


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


def failure(ask: Any) -> list[object]:
    try:
        return [0, f"no error: {ask()}"]
    except ResponseError as error:
        return [error.status_code, error.error]


def ask(question: dict[str, Any]) -> dict[str, object]:
    headers = {"x-api-key": question["key"]}
    client, embedder = (Client(question[name], headers=headers) for name in ("url", "embedder"))
    model, pulled, options = question["model"], question["pulled"], {"temperature": 0, "num_predict": 24}
    chat: dict[str, Any] = {
        "model": f"{model}:latest",
        "messages": [{"role": "user", "content": question["prompt"]}],
        "options": options,
        "keep_alive": "5m",
    }
    generation: dict[str, Any] = {"model": model, "prompt": question["prompt"], "options": options}
    weather: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": question["weather"]}],
        "tools": [get_weather],
        "options": {"temperature": 0, "num_predict": 120},
    }

    async def ask_later() -> str:
        client = AsyncClient(question["url"], headers=headers)
        return "".join([part.message.content or "" async for part in await client.chat(**chat, stream=True)])

    whole, generated = client.chat(**chat, logprobs=True, top_logprobs=2), client.generate(**generation)
    later = client.generate(**{**generation, "prompt": "And then?"}, context=generated.context)
    called = client.chat(**weather).message
    streamed = [call for part in client.chat(**weather, stream=True) for call in part.message.tool_calls or ()]
    told = {"role": "tool", "tool_name": "get_weather", "content": question["told"]}
    answered = client.chat(**{**weather, "messages": [*weather["messages"], called, told]})
    shown = client.show(model)

    digest = client.create_blob(Path(question["gguf"]))
    created = [
        client.create(model="brief", from_=model, system="Be brief.", parameters={"num_predict": 5}).status,
        [part.status for part in client.create(model="uploaded", files={"x.gguf": digest}, stream=True)][-1],
        client.copy("brief", "copied").status,
    ]
    listed = [entry.model for entry in client.list().models]
    brief = client.chat(**{**chat, "model": "copied", "options": {"temperature": 0}})
    deleted = [client.delete(name).status for name in ("brief", "copied", "uploaded")]
    progress = list(client.pull(pulled, stream=True))
    downloaded = [part for part in progress if part.digest]
    again = client.pull(pulled).status
    deleted.append(client.delete(pulled).status)
    vectors = embedder.embed("all-minilm", question["texts"], truncate=True, dimensions=8)
    unloaded = client.generate(model, keep_alive=0)
    none = client.ps().models
    loaded = client.chat(model)
    return {
        "texts": [
            whole.message.content,
            asyncio.run(ask_later()),
            generated.response,
            "".join(part.message.content or "" for part in client.chat(**chat, stream=True)),
            "".join(part.response or "" for part in client.generate(**generation, stream=True)),
        ],
        "logprobs": [len(whole.logprobs or ()), len((whole.logprobs or [None])[0].top_logprobs)],
        "end": [whole.done, whole.done_reason, whole.eval_count],
        "context": later.prompt_eval_count > len(generated.context or ()),
        "formatted": json.loads(client.chat(**chat, format=question["schema"]).message.content or ""),
        "called": [[call.function.name, dict(call.function.arguments)] for call in [*called.tool_calls, *streamed]],
        "told": answered.message.content,
        "shown": [shown.details.family, shown.details.parameter_size, shown.modelinfo["general.parameter_count"]],
        "capabilities": shown.capabilities,
        "created": created,
        "listed": listed,
        "brief": [brief.message.content, brief.eval_count],
        "deleted": deleted,
        "pulled": [
            progress[0].status,
            max(p.total for p in downloaded),
            max(p.completed for p in downloaded),
            progress[-1].status,
            again,
        ],
        "embeddings": vectors.embeddings,
        "embedding tokens": vectors.prompt_eval_count,
        "embedding": embedder.embeddings("all-minilm", question["texts"][0]).embedding,
        "residence": [unloaded.done_reason, len(none), loaded.done_reason, client.ps().models[0].model],
        "unknown model": failure(lambda: client.chat(**{**chat, "model": "no"})),
        "unknown model/pull": failure(lambda: client.pull("no/such")),
        "unknown model/pull stream": failure(lambda: list(client.pull("no/such", stream=True))),
        "no embeddings": failure(lambda: client.embed(model, "a")),
        "push": failure(lambda: client.push(model)),
    }


if __name__ == "__main__":
    print(json.dumps(ask(json.load(sys.stdin))))
