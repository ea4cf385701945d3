"""Exceptions as text, for clients, operators and users."""

_WRITTEN_FOR_PEOPLE = (ValueError, TypeError, OSError, RuntimeError)


def error_text(error: BaseException) -> str:
    """What an exception says. Never empty: an exception without a text is called by the name of its type.

    ValueError("n must be positive") -> "n must be positive"; KeyError("n") -> "KeyError: 'n'"; AssertionError() ->
    "AssertionError". Every exception that becomes a message goes through here: tests/messages checks it.
    """
    name, text = type(error).__name__, str(error).strip()
    if not text:
        return name
    return text if isinstance(error, _WRITTEN_FOR_PEOPLE) else f"{name}: {text}"
