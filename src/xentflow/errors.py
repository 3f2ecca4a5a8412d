"""The one base error of the package: what was expected, and what came."""

from typing import Any


class XentflowError(ValueError):
    """Every error that xentflow raises on purpose.

    It is a ``ValueError`` so that libraries which expect one of bad input (scikit-learn's checks, for example)
    understand it without knowing us.
    """


class WrongRequest(XentflowError):
    """Something was asked for that cannot be had, where nothing has gone wrong: the command line exits 2, not 1."""


class Diverged(XentflowError):
    """An integration whose features stopped being finite; ``path`` holds every step before that."""

    def __init__(self, message: str, path: Any) -> None:
        super().__init__(message)
        self.path = path
