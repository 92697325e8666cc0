"""The errors that reach a person: each says what was given, what is allowed, and where to set it."""


class InflightError(Exception):
    """Base of every error this package raises on purpose."""


class SettingsError(InflightError):
    """A model's configuration cannot be served; the message names the key, the value and the remedy."""


class ModelError(InflightError):
    """A model cannot be found, loaded, or reproduced; the message says why and what to change."""


class RequestError(InflightError):
    """One request is refused. It reaches only the client that sent it.

    Attributes:
        code: a name of Triton's error codes, such as ``INVALID_ARG`` or ``UNAVAILABLE``.
    """

    def __init__(self, message: str, code: str = "INVALID_ARG") -> None:
        super().__init__(message)
        self.code = code


class TraceError(InflightError):
    """A file is not a trace of this backend; the message says where and why."""


class BuildError(InflightError):
    """The compiled module is not that of the Python code beside it; the message says how to build it again."""
