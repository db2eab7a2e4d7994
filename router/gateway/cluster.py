"""`/cluster`: the providers' own workers, seen and changed. Only from this machine.

Changing takes JSON in the body: a web page in somebody's browser cannot send that here unasked.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from backends.base import BackendError, Managed
from router.errors import RouterError
from router.gateway.generate import error_response, parsed
from router.sdk import Router

_MAX_BODY_BYTES = 4096
_KEYS = {"action": str, "worker": str, "role": str, "address": str, "now": bool}


class ClusterEndpoint:
    def __init__(self, router: Router) -> None:
        self._router = router

    def _managed(self) -> dict[str, Managed]:
        return {name: backend for name, backend in self._router.backends.items() if isinstance(backend, Managed)}

    async def status(self, request: Request) -> Response:
        """GET: each such provider's workers, transfers and counters."""
        if (refused := _refuse_strangers(request)) is not None:
            return refused
        health = self._router.health()
        return JSONResponse({name: dict(health[name].detail) for name in self._managed()})

    async def change(self, request: Request) -> Response:
        """POST: one change, `{"action": "drain", "worker": "decode-0"}`; answered when it is done."""
        if (refused := _refuse_strangers(request)) is not None:
            return refused
        managed, name = self._managed(), request.path_params["provider"]
        try:
            if name not in managed:
                known = ", ".join(managed) or "none in this policy"
                raise RouterError(f"no provider {name!r} whose workers can be changed; there are {known}", status=404)
            asked = await _asked(request)
            done = await managed[name].manage(
                asked.get("action", ""),
                asked.get("worker"),
                asked.get("role"),
                asked.get("address"),
                now=asked.get("now", False),
            )
        except RouterError as error:
            return error_response(error)
        except BackendError as error:
            said = error.message if error.hint is None else f"{error.message}; {error.hint}"
            return error_response(RouterError(said, status=error.status, param=error.param))
        return JSONResponse(done)


async def _asked(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RouterError("the change goes in the body, as application/json", status=415)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise RouterError(f"the body is longer than {_MAX_BODY_BYTES} bytes", status=413)
    asked = parsed(body)
    if not isinstance(asked, dict):
        raise RouterError("the body must be a JSON object", status=400)
    for key, value in asked.items():
        if key not in _KEYS:
            raise RouterError(f"unknown key {key!r}; there are {', '.join(_KEYS)}", status=400, param=key)
        if not isinstance(value, _KEYS[key]):
            raise RouterError(f"{key} must be a {_KEYS[key].__name__}, not {value!r}", status=400, param=key)
    return asked


def _refuse_strangers(request: Request) -> Response | None:
    host = request.client.host if request.client else ""
    try:
        local = ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        local = False
    if local:
        return None
    return error_response(RouterError("/cluster is answered on the gateway's own machine only", status=403))
