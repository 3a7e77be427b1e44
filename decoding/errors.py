"""The two kinds of failure that a person sees: a wrong request, and work that could not be done."""


class DraftscopeError(Exception):
    """Work failed for a reason that is said in one clear line (exit code 1)."""


class UsageError(DraftscopeError, ValueError):
    """The request itself is wrong; the message names the thing and what is possible (exit code 2)."""


class Stopped(BaseException):
    """A Progress raises it to end the work that it is told of. It is no Exception: nothing on its way takes it for a failure."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
