"""Decisions by rules that need no embeddings."""

import asyncio
import json

from quire.semantic.router import Decision, SemanticRouter
from quire.semantic.rules import Action, Conditions, Rule, Rules


def decided(rules: Rules, **body: object) -> Decision | None:
    async def decide() -> Decision | None:
        router = await SemanticRouter.start(rules)
        return await router.decide("/v1/completions", json.dumps(body).encode())

    return asyncio.run(decide())


def test_a_model_that_only_the_client_names_is_not_chosen():
    """So it is no label of a metric, of which clients could make any number."""
    rule = Rule(name="short", when=Conditions(max_chars=10), then=Action(model="small"))
    rules = Rules(models=("*",), rule=(rule,))
    short = decided(rules, model="made up", prompt="Hello")
    assert short is not None
    assert (short.rule, short.model, short.is_chosen) == ("short", "small", True)
    long = decided(rules, model="made up", prompt="Hello, and more")
    assert long is not None
    assert (long.rule, long.model, long.is_chosen) == ("default", "made up", False)
    assert json.loads(long.body) == {"model": "made up", "prompt": "Hello, and more"}


def test_other_bodies_and_models_are_left_alone():
    rules = Rules(default_model="small")
    assert decided(rules, model="small", prompt="Hello") is None
    assert decided(rules, prompt="Hello") is None
    auto = decided(rules, model="auto", prompt="Hello")
    assert auto is not None
    assert json.loads(auto.body)["model"] == "small"
