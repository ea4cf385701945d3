"""Ollama's API: text and embeddings of the served model, and the available models."""

from fastapi import APIRouter

from quire.server.ollama import blobs, embeddings, generate, library, models
from quire.server.ollama.models import heartbeat as heartbeat
from quire.server.ollama.state import State as State

router = APIRouter()
for _module in (generate, embeddings, models, library, blobs):
    router.include_router(_module.router)
