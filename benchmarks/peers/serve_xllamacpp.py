"""Runs llama.cpp's own server, from the package xllamacpp, until it is terminated.

python serve_xllamacpp.py MODEL.gguf PORT THREADS STREAMS TOKENS

TOKENS: the context length of a stream. Prints a line of JSON once it listens.
"""

import json
import signal
import sys
from importlib.metadata import version

import xllamacpp

path, port, threads, streams, tokens = sys.argv[1], *map(int, sys.argv[2:6])
params = xllamacpp.CommonParams()
params.model.path = path
params.hostnames = ["127.0.0.1"]
params.port = port
params.n_parallel = streams
params.n_ctx = tokens * streams
params.cpuparams.n_threads = threads
params.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(params)
system = xllamacpp.get_system_info()
print(json.dumps({"version": version("xllamacpp"), "url": server.listening_address, "system": system}), flush=True)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
