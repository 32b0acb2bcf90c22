"""Prefect's server behind a filter that makes it answer as Prefect Cloud does.

Every request needs `Authorization: Bearer KEY`, and so does every WebSocket unless it authenticates by its first
message, with Prefect's own subprotocol. Addresses begin with the account and the workspace, and there are no `/admin`
routes. What was refused is written to a file, one line each.
"""

import sys
from pathlib import Path

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

KEY, WORKSPACE = "pnu_of_the_tests", "/api/accounts/a/workspaces/w"


class CloudLike:
    """The filter."""

    def __init__(self, server: ASGIApp, refused: Path) -> None:
        self.server, self.refused = server, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.server(scope, receive, send)
            return
        path, headers = str(scope["path"]), dict(scope["headers"])
        below = path.removeprefix(WORKSPACE)
        known = headers.get(b"authorization", b"").decode().lower() == f"bearer {KEY}"
        known |= b"prefect" in headers.get(b"sec-websocket-protocol", b"")
        status = 401 if not known else 404 if below == path or below.startswith("/admin") else None
        if status is None:
            inner = f"/api{below}"
            await self.server({**scope, "path": inner, "raw_path": inner.encode()}, receive, send)
            return
        with self.refused.open("a") as file:
            file.write(f"{status} {path}\n")
        answer = WebSocketClose() if scope["type"] == "websocket" else PlainTextResponse("no", status)
        await answer(scope, receive, send)


if __name__ == "__main__":
    # Two seconds of imports, which the collection of tests does without.
    import uvicorn
    from prefect.server.api.server import create_app

    port, refused = int(sys.argv[1]), Path(sys.argv[2])
    refused.touch()
    uvicorn.run(CloudLike(create_app(final=True), refused), port=port, log_level="warning")
