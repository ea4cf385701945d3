"""Profiles of running engines: traces of torch's profiler, CUDA's profiler, and ranges for Nsight Systems.

The engine imports this package when a profile is requested.
"""

from quire.config.profiler import ProfilerConfig as ProfilerConfig
