"""The engine's own code, for the checks that need it. It needs torch."""

from functools import cache

from quire.messages.errors import error_text


@cache
def import_failure() -> str | None:
    """Return the reason why the engine cannot be imported, or None. A second attempt would fail with a misleading
    message."""
    try:
        import quire.ops  # noqa: F401
    except Exception as error:
        return error_text(error)
    return None


def need_engine() -> None:
    """Import the engine. Raises RuntimeError if that fails; the PyTorch check reports the reason."""
    if import_failure() is not None:
        raise RuntimeError("PyTorch cannot be imported")


@cache
def num_threads() -> int:
    """Return the threads that an engine with one rank starts for its kernels. Raises RuntimeError like
    `need_engine`."""
    need_engine()
    from quire.executor.threads import choose_threads

    return choose_threads(sharing=1)
