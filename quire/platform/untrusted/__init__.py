"""Runs work whose cost a client controls in a pool of worker processes, which can be stopped.

    from quire.platform.untrusted.limits import Limits
    from quire.platform.untrusted.pool import shared_pool
    limits = Limits(cpu_seconds=2, memory_bytes=512 << 20)
    size = shared_pool().run("quire.multimodal.pictures:size_of", data, limits=limits)

Each job runs in a process of its own, which a *launcher* process forks. The launcher imports the modules that jobs
name, runs their preparations (such as building a tokenizer's table), and never receives a client's data. So a job
starts within two milliseconds, killing a job affects no other, and no data of a job reaches the next one. Modules that
jobs name must not import torch or transformers, which would add to the pool's memory and start time.

`confinement.py` describes what a job may do, and `service.py` how jobs share the processors.
"""
