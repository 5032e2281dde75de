"""A route that takes no query parameter that it does not know: a misspelt one would choose all."""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from duetime.errors import InvalidMessage, Reason

#: What is asked by other tools, some of which add parameters of their own, has no such prefix.
CHECKED = "/v1/"

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Route(APIRoute):
    """All that is asked of `/v1`."""

    def get_route_handler(self) -> Handler:
        """What answers. It costs nothing where there is no query."""
        answer = super().get_route_handler()
        if not self.path.startswith(CHECKED):
            return answer
        known = [each.alias for each in self.dependant.query_params]

        async def answer_known(request: Request) -> Response:
            if request.scope["query_string"]:
                _check_known(request.query_params, known)
            return await answer(request)

        return answer_known


def _check_known(given: Iterable[str], known: list[str]) -> None:
    for name in given:
        if name not in known:
            takes = f"use {', '.join(known)}" if known else "leave it out"
            raise InvalidMessage(Reason.UNREADABLE, f"no parameter is called {name!r}: {takes}")
