"""Runs work whose cost a client controls in processes that can be stopped: a pool of worker processes.

    from quire.platform.untrusted.limits import Limits
    from quire.platform.untrusted.pool import shared_pool
    limits = Limits(cpu_seconds=2, memory_bytes=512 << 20)
    size = shared_pool().run("quire.multimodal.pictures:size_of", data, limits=limits)

Each job runs in a process of its own, which a *launcher* process forks. The launcher imports the modules that jobs
name, runs their preparations (such as building a tokenizer's table), and never sees what a client sent. So a job starts
within two milliseconds, a killed job costs nothing but itself, and nothing of a job reaches the next one. Modules that
jobs name must not import torch or transformers: their memory and their time would be the pool's.

What a job may do is described in `confinement.py`, and how jobs share the processors in `service.py`.
"""
