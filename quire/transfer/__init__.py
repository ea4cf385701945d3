"""Disaggregated prefill and decode: engines read the KV blocks of prompts that other engines have computed.

This plug-in is loaded if kv_transfer_config is set. It contains the two halves of a connector:

    exchange.py     the scheduler's half: imports.py loads blocks, exports.py offers them, link.py connects the cores
    ranks.py        the workers' half: store.py reads blocks through the transports of sources.py, server.py sends
                    them, layout.py maps one rank's blocks to another's

Weights from a trainer are received by quire/worker/weight_groups.py.
"""
