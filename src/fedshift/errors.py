"""What a user is told in one clear sentence, with no traceback at the command line, and the exit code it ends with."""

from __future__ import annotations

import errno
import os
import re


class UserError(Exception):
    """Something the user asked for cannot be done; the message is one sentence that says what is wrong and what to do.

    >>> raise UserError("alpha must be positive, not -1")
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: alpha must be positive, not -1
    """

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: the sentence."""
        return [f"error: {self}"]


class HostError(UserError):
    """The operating system said no: a full disk, a file that may not be written, a folder that is gone."""

    exit_code = 1

    @staticmethod
    def of(error: BaseException, what: str = "", hint: str = "") -> HostError:
        """One sentence of what the system said; ``what`` could not be written, if the error does not name it.

        >>> print(HostError.of(OSError(28, "No space left on device"), "runs/a", "make room"))
        runs/a cannot be written (No space left on device); make room
        >>> print(HostError.of(FileNotFoundError(2, "No such file or directory"), "runs/a"))
        runs/a cannot be written (No such file or directory: its folder is gone)
        """
        reason = reason_of(error)
        gone = isinstance(error, FileNotFoundError) and bool(what)
        named = what or str(getattr(error, "filename", None) or "a file")
        verb = "cannot be written" if what or _number(error) in WRITING else "cannot be used"
        sentence = f"{named} {verb} ({reason}{': its folder is gone' if gone else ''})"
        return HostError(f"{sentence}; {hint}" if hint else sentence)


WRITING = (errno.ENOSPC, errno.EFBIG, errno.EROFS, errno.EDQUOT)


def reason_of(error: BaseException) -> str:
    """What the system said, also where a library speaks for it.

    >>> reason_of(ValueError("Error while serializing: I/O error: File too large (os error 27)"))
    'File too large'
    """
    number = _number(error)
    return (os.strerror(number) if number else "") or str(error)


def _number(error: BaseException) -> int | None:
    return getattr(error, "errno", None) or number_in(str(error))


def number_in(text: str) -> int | None:
    """The system's own number of an error in a library's message, if there is one.

    NumPy only says how much of a file was taken: a limit on the size of files is the reason if there is one.
    """
    if re.fullmatch(r"\d+ requested and \d+ written", text):
        return errno.EFBIG if _files_are_limited() else errno.ENOSPC
    found = re.search(r"\(os error (\d+)\)", text)
    return int(found.group(1)) if found else None


def _files_are_limited() -> bool:
    try:
        import resource
    except ImportError:  # not a Unix
        return False
    return resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
