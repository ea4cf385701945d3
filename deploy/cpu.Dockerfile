# The server for CPUs. Run this in a copy of the repository; docs/deployment.md has more:
#     python tools/build_wheel.py
#     docker build --file deploy/cpu.Dockerfile --tag quire .
# BASE: an image with Python 3.11 to 3.13 and its module venv.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY dist/*.whl /wheels/
RUN python3 -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir --no-compile /wheels/*.whl \
    && /opt/quire/bin/python -m compileall -q /opt/quire/lib/python3*/site-packages/quire* \
    && rm -rf /opt/quire/lib/python3*/site-packages/pip* /opt/quire/lib/python3*/site-packages/torch/include

FROM ${BASE}
COPY --from=build /opt/quire /opt/quire
COPY --chmod=755 deploy/entrypoint.sh /usr/local/bin/quire-entrypoint
RUN install -d -o 10001 -g 10001 /models
# The cache folder has the packed weights of models: the next container starts with them.
ENV PATH=/opt/quire/bin:$PATH HF_HOME=/models XDG_CACHE_HOME=/models/cache PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["quire-entrypoint"]
