# The server for NVIDIA GPUs. Run this in a copy of the repository; docs/deployment.md has more:
#     python tools/build_wheel.py
#     docker build --file deploy/cuda.Dockerfile --tag quire-cuda .
# BASE: an image of Debian or Ubuntu with Python 3.11 to 3.13, its module venv and its headers. CUDA's libraries come with
# PyTorch, the driver with the host.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
COPY dist/*.whl /wheels/
RUN python3 -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir --no-compile /wheels/*.whl

FROM ${BASE}
# Triton compiles the code with which it starts kernels. An image with the output of `quire compile` needs no compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/quire /opt/quire
COPY --chmod=755 deploy/entrypoint.sh /usr/local/bin/quire-entrypoint
RUN install -d -o 10001 -g 10001 /models
ENV PATH=/opt/quire/bin:$PATH HF_HOME=/models XDG_CACHE_HOME=/models/cache PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["quire-entrypoint"]
