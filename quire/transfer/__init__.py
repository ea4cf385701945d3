"""Prefill and decode apart: engines read the KV blocks of prompts that other engines have computed.

A plug-in of the engine, loaded if kv_transfer_config is given. It has the two halves of a
connector:

    exchange.py     the scheduler's half: what to load (imports.py), what to hold (exports.py), over link.py
    ranks.py        the workers' half: a store that reads (store.py, from sources.py) what servers send (server.py), as
                    layout.py says

Weights from a trainer come another way: quire/worker/weight_groups.py.
"""
