"""DSPy, asking through litellm, which is told what the model can do."""

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else litellm asks the internet for prices

import dspy
import litellm
from question import WEATHER, Place, Question, answer


class Locate(dspy.Signature):
    """Say where the person lives."""

    person: str = dspy.InputField()
    place: Place = dspy.OutputField()


def ask(question: Question) -> dict[str, object]:
    can = {"supports_response_schema": True, "supports_function_calling": True}
    litellm.register_model({f"openai/{question.model}": {"litellm_provider": "openai", "mode": "chat", **can}})
    server = {"api_base": question.url, "api_key": question.key, "temperature": 0, "num_retries": 0, "cache": False}

    def model(name: str, tokens: int, kind: str = "chat") -> dspy.LM:
        return dspy.LM(f"openai/{name}", **server, max_tokens=tokens, model_type=kind, engine="litellm")

    chat, long = model(question.model, question.tokens), model(question.model, 200)
    user = {"role": "user", "content": question.weather}
    tools = {"tools": [{"type": "function", "function": WEATHER}]}
    [called] = long(messages=[user], **tools)
    [call] = called["tool_calls"]
    turns = [
        user,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": question.sky},
    ]
    answers: dict[str, object] = {
        "chat": text_of(chat(question.prompt)),
        "chat/responses": text_of(model(question.model, question.tokens, "responses")(question.prompt)),
        "tools": [[call["function"]["name"], json.loads(call["function"]["arguments"])]],
        "result": text_of(long(messages=turns, **tools)),
        "unknown model": answer(lambda: model("no", question.tokens)(question.prompt)),
        "long prompt": answer(lambda: chat(question.long_prompt)),
    }
    predictor = dspy.Predict(Locate)
    with dspy.context(lm=long, adapter=dspy.JSONAdapter()):
        answers["structured"] = predictor(person="Ada").place.city
        answers["structured/stream"] = asyncio.run(streamed(predictor)).place.city
    return answers


async def streamed(predictor: dspy.Predict) -> dspy.Prediction:
    async for part in dspy.streamify(predictor)(person="Ada"):
        last = part
    return last


def text_of(outputs: list[object]) -> object:
    [output] = outputs
    return output["text"] if isinstance(output, dict) else output


if __name__ == "__main__":
    Question.answer_with(ask)
