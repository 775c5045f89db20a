"""Access to the pages: loopback without a secret, any other address with a token, and the headers of every answer.

Without a token a request must name this machine as its host: a page of another site whose name resolves to 127.0.0.1
could read the answers otherwise. A token comes once in the address, as `?token=`, and is then kept in a cookie that no
script can read; programs send it as `Authorization: Bearer TOKEN`.
"""

import hmac
import os
import secrets

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from schemas.config.services import is_loopback, without_brackets
from schemas.errors import ConfigError

log = structlog.get_logger("view")

TOKEN_VARIABLE = "ACTORS_VIEW_TOKEN"  # noqa: S105 - the variable's name, no secret
COOKIE = "actors_view"
FEWEST_CHARACTERS = 16
"""Length of the shortest token."""
READING = ("GET", "HEAD")
HEADERS = {
    # nothing of another host, no script or style in the page itself; texts of a run can't become code
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def token_for(host: str) -> str:
    """Return the token that requests need: that of ACTORS_VIEW_TOKEN, else a new one beyond loopback, else none.

    Raises:
        ConfigError: the variable's token is too short.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and (len(token) < FEWEST_CHARACTERS or not token.isascii()):
        raise ConfigError(f"{TOKEN_VARIABLE}: needs at least {FEWEST_CHARACTERS} characters of ASCII, got {len(token)}")
    return token or ("" if is_loopback(host) else secrets.token_urlsafe(24))


def guarded(token: str) -> Middleware:
    """Return the middleware that lets in reading requests with the token, or from this machine where there is none."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in READING:
            response: web.StreamResponse = _refusal(405, "pages are read-only: only GET and HEAD are answered")
            response.headers["Allow"] = ", ".join(READING)
        elif token and _is_equal(request.query.get("token", ""), token):
            response = _with_cookie(request, token)
        elif token and not _is_equal(_presented(request), token):
            response = _refusal(401, "open the address that `actors view` has printed: it has the token")
        elif not token and not _names_this_machine(request):
            response = _refusal(403, "without a token the address must be localhost or 127.0.0.1")
        else:
            response = await _answered(request, handler)
        response.headers.update(HEADERS)
        return response

    return guard


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:  # of aiohttp's router: no such page
        return _refusal(error.status, error.reason)
    except Exception:
        log.exception("page failed", path=request.path)
        return _refusal(500, "this page failed; the terminal of `actors view` has the reason")


def _refusal(status: int, words: str) -> web.Response:
    return web.json_response({"error": words}, status=status)


def _presented(request: web.Request) -> str:
    """Return the token of a request's cookie or header; empty if there is none."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    return value if kind == "Bearer" else request.cookies.get(_cookie(request), "")


def _with_cookie(request: web.Request, token: str) -> web.Response:
    """Return a redirect to the same page without the token, which would stay in the browser's history."""
    rest = request.url.without_query_params("token")
    # the path alone, so that nobody can be sent to another host; one slash, since //name would be a host
    target = "/" + rest.raw_path_qs.lstrip("/")
    response = web.Response(status=303, headers={"Location": target})
    response.set_cookie(_cookie(request), token, httponly=True, samesite="Strict", path="/")
    return response


def _cookie(request: web.Request) -> str:
    # browsers share cookies between the ports of a host, and another viewer has another token
    return f"{COOKIE}_{request.url.port}"


def _names_this_machine(request: web.Request) -> bool:
    return is_loopback(without_brackets(request.url.host or ""))


def _is_equal(given: str, token: str) -> bool:
    # in constant time; as bytes, since a header may have characters beyond ASCII
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())
