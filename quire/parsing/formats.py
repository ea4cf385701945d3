"""The tool call formats in formats.toml, by vLLM's names."""

from quire.parsing.annotations import annotated_call, json_or_annotated_call
from quire.parsing.braces import braced_call
from quire.parsing.calls import ToolFormat, json_calls, pythonic_block, pythonic_calls, tagged_call
from quire.parsing.channels import inkling, muse, muse_glimmer
from quire.parsing.elements import element_call
from quire.parsing.harmony import harmony
from quire.parsing.tables import formats

_BODIES = (
    annotated_call,
    braced_call,
    element_call,
    json_calls,
    json_or_annotated_call,
    pythonic_block,
    pythonic_calls,
    tagged_call,
)
_WHOLE = (harmony, inkling, muse, muse_glimmer)
TOOLS: dict[str, ToolFormat] = formats(__file__, ToolFormat, (*_BODIES, *_WHOLE))
