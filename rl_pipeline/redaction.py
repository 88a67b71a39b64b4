"""No password leaves: one function for every text that is shown, stored or sent."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
# Backslashes: Hydra and JSON write them into URIs. One of a list ends where the next begins.
_BEGIN = r"([a-z][a-z0-9+.-]*)(\\*:\\*/\\*/)"
_URI = re.compile(rf"(?<![a-z0-9]){_BEGIN}((?:(?![,;|]+{_BEGIN})[^\s\"'<>`])*)", re.I)
_FILES = ("sqlite", "file")
"""Kinds of URI that name no user: an `@` belongs to the path."""
_QUERY = re.compile(r"([?&;])([^=&;?\s\"'<>]+)=([^&;\s\"'<>`]*)")
_SECRET_KEY = re.compile(r"passw|pwd|\bpass\b|token|secret|key|credential|\bsig\b|signature|auth")
_PUBLIC_KEYS = ("sslkey", "passfile", "authmechanism", "authsource", "keepalives")
_WORDS = re.compile(r"(?i)\b((?:ssl)?passw(?:or)?d\s*[=:]\s*)('[^']*'|\"[^\"]*\"|[^\s,;&'\"]+)")
_HEADER = re.compile(r"(?i)(authorization\W{1,5}(?:basic|bearer)\s+)[^\s\"',]+")
_ENVIRON_URIS = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_BACKEND_STORE_URI")
_ENVIRON = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "PGPASSWORD")


def redact(text: str, *uris: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` without the passwords, tokens and keys of the URIs in it.

    Those of `uris` and of the environment's stores are taken out wherever they stand: libraries
    repeat a password alone in their errors, decoded, encoded or in part.
    """
    environ = os.environ if environ is None else environ
    known = [*uris, *(environ[name] for name in _ENVIRON_URIS if environ.get(name))]
    secrets = [secret for uri in known for secret in secrets_of(uri)]
    secrets += [environ[name] for name in _ENVIRON if environ.get(name)]
    # A whole URI first: in one with an odd password only its owner knows where that ends.
    for uri in known:
        if uri in text:
            text = text.replace(uri, _without_secrets(uri))
    text = _URI.sub(lambda found: _without_secrets(found[0]), text)
    text = _HEADER.sub(rf"\1{HIDDEN}", _WORDS.sub(rf"\1{HIDDEN}", text))
    if pattern := _pattern(secrets):
        text = pattern.sub(HIDDEN, text)
    return text


def holds_secret(text: str) -> bool:
    """Whether a text has a URI with user-info, or with a key that is called like a secret."""
    return any(_without_secrets(found[0]) != found[0] for found in _URI.finditer(text))


def secrets_of(uri: str) -> list[str]:
    """The password of a URI, the token in a user name's place, and the secrets of its query."""
    _, _, rest = uri.partition("://")
    info, at, _ = rest.rpartition("@")
    user, colon, password = info.partition(":")
    found = [password] if password else []
    if at and not _is_name(user, password):
        found.append(user)
    if uri.split(":", 1)[0].split("+")[0].lower() in _FILES:
        found = []
    found += [value for _, key, value in _QUERY.findall(rest) if _is_secret(key)]
    return [secret for secret in found if secret]


def _without_secrets(uri: str) -> str:
    parts = re.match(rf"{_BEGIN}(.*)", uri, re.I | re.S)
    if parts is None:
        return uri
    scheme, separator, rest = parts.groups()
    info, at, place = rest.rpartition("@")
    if at and scheme.split("+")[0].lower() not in _FILES:
        user, _, password = info.partition(":")
        shown = f"{user}:{HIDDEN}" if _is_name(user, password) else HIDDEN
        rest = f"{shown}@{place}"
    rest = _QUERY.sub(lambda q: f"{q[1]}{q[2]}={HIDDEN if _is_secret(q[2]) else q[3]}", rest)
    return f"{scheme}{separator}{rest}"


def _is_name(user: str, password: str) -> bool:
    """Whether it is a person's name that stands before the colon, and not a token."""
    return bool(re.fullmatch(r"[A-Za-z_][\w.-]{0,15}", user)) and password not in (
        "", "x", "x-oauth-basic", "x-token-auth",
    )  # fmt: skip


def _is_secret(key: str) -> bool:
    key = unquote_plus(key).lower()
    return bool(_SECRET_KEY.search(key)) and key not in _PUBLIC_KEYS


def _parts(secret: str) -> set[str]:
    """Parts of a password that libraries show if they took it for a host, a port or a path."""
    ends = [found.start() for found in re.finditer(r"[/?#@:&\[\]\s]", secret)]
    between = [-1, *ends, len(secret)]
    return {secret[a + 1 : b] for a in between for b in between if b - a > 2}


def _pattern(secrets: Iterable[str]) -> re.Pattern[str] | None:
    forms: set[str] = set()
    for secret in secrets:
        for plain in {secret, unquote(secret), unquote_plus(secret), *_parts(unquote(secret))}:
            forms |= {
                plain, quote(plain), quote(plain, safe=""), quote(plain, safe=" +"),
                quote_plus(plain), repr(plain)[1:-1], json.dumps(plain)[1:-1],
            }  # fmt: skip
    longest_first = sorted((f for f in forms if len(f) > 1 and f != HIDDEN), key=len, reverse=True)
    # A short one only where it stands alone: `a` is no reason to hide every a.
    shown = [
        re.escape(form) if len(form) > 5 else rf"(?<!\w){re.escape(form)}(?!\w)"
        for form in longest_first
    ]
    return re.compile("|".join(shown), re.I) if shown else None
