"""Reads from the config.json of a drafter's checkpoint how the drafter is used."""

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.models.spec import HfConfig

# speculators_model_type -> method. P-EAGLE is an EAGLE-3 whose head guesses all drafts at once.
_SPECULATORS = {name: name for name in ("eagle", "eagle3", "mtp", "medusa")}
_SPECULATORS |= {"peagle": "eagle3", "independent": "draft_model"}
_NUMBERS = {  # method -> further fields, one of which may contain the number of drafts
    "medusa": ("medusa_num_heads", "num_heads"),
    "mtp": ("num_nextn_predict_layers",),
}


def speculative_fields(config: "HfConfig", name: str = "") -> dict[str, Any]:
    """Return the field `method` of speculative_config, derived as in vLLM, and `num_speculative_tokens` if the config
    has it.

    name: the checkpoint's path or hub id. The first EAGLE heads have the config of a small Llama, so only their name
    identifies them. Raises ValueError for an unsupported method, and for a wrong number.
    """
    if "speculators_model_type" in config:
        return _speculators_fields(config)
    method = _method(config, PurePath(name).name.lower())
    fields = ("n_predict", "num_lookahead_tokens", *_NUMBERS.get(method, ()))
    return _fields(method, next((config[field] for field in fields if config.get(field) is not None), None))


def speculators_target(config: "HfConfig", model: str) -> tuple[str, dict[str, Any]] | None:
    """Return the target model and the speculative_config of a checkpoint of the library speculators, None for others.
    The target is the name or path of the model for which it was trained. So such a checkpoint can be served by its own
    name. config: of `model`. Raises ValueError if the config does not name the target, and as `speculative_fields`
    does.
    """
    if "speculators_model_type" not in config:
        return None
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    target = verifier.get("name_or_path")
    if not target:
        raise ValueError(
            f"{model} is a drafter whose config.json does not name its target (verifier.name_or_path); serve the "
            'target with --speculative-config \'{"model": "' + model + "\"}'"
        )
    return target, {"model": model, **speculative_fields(config)}


def _speculators_fields(config: "HfConfig") -> dict[str, Any]:
    kind = config["speculators_model_type"]
    if kind not in _SPECULATORS:
        raise ValueError(f"speculators_model_type {kind!r} is not supported; supported: {', '.join(_SPECULATORS)}")
    options = config.get("speculators_config") or {}
    proposals = options.get("proposal_methods") or [{}]
    default = options.get("default_proposal_method")
    proposal = next((p for p in proposals if p.get("proposal_type") == default), proposals[0])
    return _fields(_SPECULATORS[kind], proposal.get("speculative_tokens"))


def _method(config: "HfConfig", name: str) -> str:
    kind = " ".join([config.get("model_type", ""), *(config.get("architectures") or [])]).lower()
    if "medusa" in kind or "medusa_num_heads" in config:  # older checkpoints have no model_type
        return "medusa"
    if "mlp_speculator" in kind:
        return "mlp_speculator"
    if "eagle3" in kind or "draft_vocab_size" in config:
        return "eagle3"
    if "eagle" in kind:
        return "eagle"
    if "mtp" in kind or config.get("num_nextn_predict_layers"):
        return "mtp"
    if "eagle3" in name:
        return "eagle3"
    return "eagle" if "eagle" in name else "draft_model"


def _fields(method: str, number: Any) -> dict[str, Any]:
    if number is None:
        return {"method": method}
    if type(number) is not int or number < 1:
        raise ValueError(f"config.json of the drafter: the number of drafts must be at least 1, got {number!r}")
    return {"method": method, "num_speculative_tokens": number}
