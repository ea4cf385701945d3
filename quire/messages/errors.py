"""The text of exceptions for clients, operators and users, and the exception for a failed engine."""

_WRITTEN_FOR_PEOPLE = (ValueError, TypeError, OSError, RuntimeError)


def error_text(error: BaseException) -> str:
    """Return the text of an exception. It is never empty: without a text, it is the name of the exception's type.

    ValueError("n must be positive") -> "n must be positive"; KeyError("n") -> "KeyError: 'n'"; AssertionError() ->
    "AssertionError". Every exception that becomes a message must be converted here; tests/messages checks that.
    """
    name = type(error).__name__
    text = str(error).strip()
    if not text:
        return name
    return text if isinstance(error, _WRITTEN_FOR_PEOPLE) else f"{name}: {text}"


class EngineDeadError(RuntimeError):
    """A step failed on the device, and the engine cannot continue. `__cause__` is the exception of the step."""
