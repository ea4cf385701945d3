"""Variants of every family, with the unusual choices of its checkpoints, as fields of config.json.

The first variant of a family is its usual form. Unusual sizes are intended. The numbers of heads and the
widths of MLPs and experts are even, for tests with two ranks.
"""

from __future__ import annotations

from typing import Any

from support.families.experts import EXPERTS
from support.families.layer_norm import LAYER_NORM
from support.families.mixtures import MIXTURES
from support.families.published import PUBLISHED
from support.families.recent import RECENT, RECENT_EXPERTS
from support.families.rms_norm import RMS_NORM
from support.families.states import STATES

NEW_VARIANTS = {**RMS_NORM, **LAYER_NORM, **EXPERTS, **RECENT, **RECENT_EXPERTS, **MIXTURES, **STATES, **PUBLISHED}

# Differences of the reference's config, where transformers decides differently from an engine.
# longrope: an engine uses the long factors for every request if the longest request may exceed the original length.
# transformers decides in each forward pass, by the length of that pass.
REFERENCE_CONFIG: dict[str, dict[str, Any]] = {}
for _name in ("phi3-longrope", "phi3-longrope-partial"):
    _parameters = NEW_VARIANTS[_name][1]["rope_parameters"]
    REFERENCE_CONFIG[_name] = {"rope_parameters": {**_parameters, "short_factor": _parameters["long_factor"]}}
_kind, _config, _writing = STATES["nemotron_h-puzzle"]
REFERENCE_CONFIG["nemotron_h-puzzle"] = {"layer_types": _config["layer_types"], "num_key_value_heads": 2} | {
    name: _config[name] for name in ("n_routed_experts", "moe_intermediate_size")
}
