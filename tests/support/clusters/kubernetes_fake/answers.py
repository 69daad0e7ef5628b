"""What the API server answers when it refuses: the Status objects, with Kubernetes' reasons and codes."""

from __future__ import annotations

from typing import Any

_CODES = {
    "BadRequest": 400,
    "Unauthorized": 401,
    "Forbidden": 403,
    "NotFound": 404,
    "MethodNotAllowed": 405,
    "AlreadyExists": 409,
    "Conflict": 409,
    "Gone": 410,
    "Expired": 410,
    "UnsupportedMediaType": 415,
    "Invalid": 422,
    "TooManyRequests": 429,
    "InternalError": 500,
    "ServiceUnavailable": 503,
    "Timeout": 504,
}


class ApiError(Exception):
    """A request is refused.

    Attributes:
        reason: Kubernetes' word for it.
        code: of HTTP.
        message: for people.
        details: what it is about.
    """

    def __init__(self, reason: str, message: str, **details: Any) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.code = _CODES[reason]
        self.message = message
        self.details = details

    @classmethod
    def of_code(cls, code: int, message: str) -> ApiError:
        """The one that has this code."""
        return cls(next(reason for reason, its in _CODES.items() if its == code), message)

    def status(self) -> dict[str, Any]:
        """The object that says so."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }
