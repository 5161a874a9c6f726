"""Query keys of GET routes: a route honours those that it declares; others are refused by name."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest

from server.errors import InvalidRequestError, UnknownFieldError, echoed


class QueryCheck:
    """A dependency of every route. It reads the keys from the route's own parameters.

    ignores: paths where any query is ignored, because browsers and monitors add keys of their own
    to pages and probes. Queries of POST routes are ignored, too: some clients put a version there.
    """

    def __init__(self, ignores: frozenset[str]) -> None:
        self._ignores = ignores

    async def __call__(self, request: HttpRequest) -> None:
        """Raises UnknownFieldError, and InvalidRequestError for a key that is given twice."""
        route = request.scope["route"]
        if request.method not in ("GET", "HEAD") or route.path in self._ignores:
            return
        known = {field.alias for field in route.dependant.query_params}
        for key in request.query_params:
            if key not in known:
                name = echoed(key, 64).strip("'")
                raise UnknownFieldError(f"Unknown query key: {name}.", param=name)
            if len(request.query_params.getlist(key)) > 1:
                raise InvalidRequestError(f"{key}: may be given once.", param=key)
