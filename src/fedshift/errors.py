"""The one exception a user's mistake raises: a single clear sentence, no traceback at the command line, exit code 2."""


class UserError(Exception):
    """Something the user asked for cannot be done; the message is one sentence that says what is wrong and what to do.

    >>> raise UserError("alpha must be positive, not -1")
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: alpha must be positive, not -1
    """

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: the sentence."""
        return [f"error: {self}"]
