"""Finds the facts of a model by its name: in a folder, in the hub's cache, or on the hub."""

from typing import Any, NamedTuple

from quire.checkpoints.hub import local_model
from quire.cli.models.cache import complete_snapshot
from quire.cli.models.facts import Facts, facts_of
from quire.cli.models.remote import ask_hub, describe
from quire.cli.models.short_names import BUNDLED


class Found(NamedTuple):
    """The facts of a model. place: where they come from. kinds: a line about the kinds of GGUF files on the hub, if
    there are several.
    """

    facts: Facts
    place: str
    kinds: list[tuple[str, str]]


def look_up(model: str | None, options: dict[str, Any]) -> Found:
    """No weights are downloaded. model: None for the bundled one. options: may have revision, download_dir and
    hf_token. Raises ModelNotFoundError."""
    if (path := local_model(model)) is not None:
        return Found(facts_of(path), f"{path} (bundled)" if model is None else str(path), [])
    name = model or BUNDLED
    if (snapshot := complete_snapshot(name, options.get("revision"), options.get("download_dir"))) is not None:
        return Found(facts_of(snapshot), f"{snapshot} (the hub's cache)", [])
    remote = ask_hub(name, options.get("revision"), options.get("hf_token"))
    facts = describe(remote, options.get("hf_token"))
    return Found(facts, f"on the hub, commit {remote.commit}", remote.kinds)
