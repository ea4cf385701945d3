"""Variants of every family: the odd choices that its checkpoints make, in the words of their config.json.

The first variant of a family is its usual form. Where sizes are odd, they are so on purpose; the numbers of heads and
the widths of MLPs and experts divide by 2, for tests with two ranks.
"""

from __future__ import annotations

from typing import Any

from support.families.experts import EXPERTS
from support.families.layer_norm import LAYER_NORM
from support.families.rms_norm import RMS_NORM

NEW_VARIANTS = {**RMS_NORM, **LAYER_NORM, **EXPERTS}

# Where transformers must be told what an engine decides otherwise: differences of the reference's config.
# longrope: an engine takes the long factors, for every request, if its longest one may exceed the original length;
# transformers in each forward pass by the length there.
REFERENCE_CONFIG: dict[str, dict[str, Any]] = {}
for _name in ("phi3-longrope", "phi3-longrope-partial"):
    _parameters = NEW_VARIANTS[_name][1]["rope_parameters"]
    REFERENCE_CONFIG[_name] = {"rope_parameters": {**_parameters, "short_factor": _parameters["long_factor"]}}
