"""Creates the proposer that the options select."""

from quire.config.declaration import imported
from quire.config.speculative import SpeculativeOptions
from quire.speculation.proposer import Proposer
from quire.speculation.suffix import SuffixOptions, SuffixProposer

_TOKENS_OF_AN_ANSWER = 256  # assumed average, to limit the memory for recent outputs
_RECENT_TOKENS = 1 << 17  # at most searched per step


def make_proposer(options: SpeculativeOptions) -> Proposer:
    """Create the proposer. Raises ConfigError if a class cannot be imported."""
    if options.method == "ngram":
        found = SuffixOptions(options.prompt_lookup_min, options.prompt_lookup_max, float("inf"), 0.0)
    elif options.method == "suffix":
        found = SuffixOptions(
            max_match=options.suffix_decoding_max_tree_depth,
            factor=options.suffix_decoding_max_spec_factor,
            min_probability=options.suffix_decoding_min_token_prob,
            recent_tokens=min(_RECENT_TOKENS, options.suffix_decoding_max_cached_requests * _TOKENS_OF_AN_ANSWER),
        )
    else:
        return imported("speculative_config", str(options.model))(options)  # type: ignore[no-any-return]
    return SuffixProposer(found)
