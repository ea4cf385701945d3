"""Profiles of running engines: traces of torch's profiler, CUDA's profiler, and ranges for Nsight Systems.

The engine imports it when a profile is asked for.
"""

from quire.config.profiler import ProfilerConfig as ProfilerConfig
