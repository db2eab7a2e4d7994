"""Which paths the gateway answers, and what it says where a path, method or body is wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from backends.base import Health, Surface
from router.errors import RouterError
from router.gateway.cluster import ClusterEndpoint
from router.gateway.generate import KEY, CountTokens, Generate, error_response, internal_error
from router.keys import Doorkeeper, Key
from router.metrics import CONTENT_TYPE
from router.sdk import Router

_SURFACES: dict[str, Surface] = {
    "/v1/chat/completions": "chat.completions",
    "/v1/completions": "completions",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
}
_OPEN = ("/health", "/metrics", "/cluster")
"""What probes and scrapers ask without a key. /cluster goes by the machine."""
_PATHS = (
    *[f"POST {path}" for path in _SURFACES],
    "POST /v1/messages/count_tokens",
    "GET /v1/models",
    "GET /health",
    "GET /metrics",
    "GET /cluster",
)


class Gateway:
    """The ASGI application. What answers come from goes straight to its endpoint: routing and middleware of a general
    framework cost as much as the rest of a relayed request."""

    def __init__(self, endpoints: Mapping[str, Generate], rest: Starlette, doorkeeper: Doorkeeper | None) -> None:
        self._endpoints = endpoints
        self._rest = rest
        self._doorkeeper = doorkeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._doorkeeper is not None and scope["type"] == "http" and not scope["path"].startswith(_OPEN):
            try:
                scope[KEY] = self._doorkeeper.check(dict(scope["headers"]))
            except RouterError as error:
                response = error_response(error, surface=_surface_of(scope["path"]))
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        if scope["type"] == "http" and scope["method"] == "POST" and (to := self._endpoints.get(scope["path"])):
            await to(scope, receive, send)
        else:
            await self._rest(scope, receive, send)


def create_app(router: Router, doorkeeper: Doorkeeper | None = None) -> Gateway:
    """Its lifespan starts and closes `router`. Without `doorkeeper` everybody is let in."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with router:
            yield

    created = int(time.time())

    def routes_for(request: Request) -> list[str]:
        key: Key | None = request.scope.get(KEY)
        return [name for name in router.policy.routes if key is None or key.may_ask(name)]

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name, created) for name in routes_for(request)]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in routes_for(request):
            return error_response(
                RouterError(f"no model {name!r}; GET /v1/models lists them", status=404, code="model_not_found")
            )
        return JSONResponse(_model(name, created))

    async def health(_: Request) -> Response:
        providers = router.health()
        serving = _serves_every_route(router, providers)
        status = "ok" if all(each.ok for each in providers.values()) else "degraded" if serving else "failing"
        body = {
            "status": status,
            "policy": {
                "file": router.policy.filename,
                "reloads": router.reloading.reloads,
                "error": router.reloading.error,
            },
            "providers": {name: {"ok": each.ok, **each.detail} for name, each in providers.items()},
        }
        return JSONResponse(body, status_code=200 if serving else 503)

    async def metrics(_: Request) -> Response:
        return Response(router.ledger.metrics.text(), media_type=CONTENT_TYPE)

    cluster = ClusterEndpoint(router)
    endpoints = {path: Generate(router, surface) for path, surface in _SURFACES.items()}
    rest = Starlette(
        routes=[
            *[Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()],
            Route("/v1/messages/count_tokens", CountTokens(router), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/cluster", cluster.status),
            Route("/cluster/{provider}", cluster.change, methods=["POST"]),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: _http_error, Exception: _bug},
    )
    return Gateway(endpoints, rest, doorkeeper)


def _model(name: str, created: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": "splitroute"}


def _serves_every_route(router: Router, providers: dict[str, Health]) -> bool:
    policy = router.policy
    return all(
        any(providers[policy.targets[name].provider].ok for rule in rules for name in rule.candidates)
        for rules in policy.routes.values()
    )


def _surface_of(path: str) -> Surface:
    return "messages" if path.startswith("/v1/messages") else "chat.completions"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    said = f"{asked} is not served here; served are {', '.join(_PATHS)}" if error.status_code in (404, 405) else asked
    response = error_response(RouterError(said, status=error.status_code), surface=_surface_of(request.url.path))
    response.headers.update(error.headers or {})
    return response


async def _bug(_: Request, error: Exception) -> Response:
    # Starlette logs the traceback after this; the client gets none of it.
    return error_response(internal_error())
