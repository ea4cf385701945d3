"""Ollama's API: text and embeddings of the served model, and the available models."""

from fastapi import APIRouter

from quire.server.ollama import blobs, embeddings, generate, library, models
from quire.server.ollama.models import heartbeat as heartbeat
from quire.server.ollama.state import Library as Library
from quire.server.ollama.state import Served as Served
from quire.server.ollama.state import State as State

# The routes of one model, and those about all models or the server.
MODEL_ROUTERS = (generate.router, embeddings.router, library.derived)
SERVER_ROUTERS = (models.about, library.router, blobs.router)
router = APIRouter()
for _router in (*MODEL_ROUTERS, models.router, models.lists, *SERVER_ROUTERS):
    router.include_router(_router)
