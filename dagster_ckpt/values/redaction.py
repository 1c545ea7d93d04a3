"""Redact secrets from text, URLs, settings and command lines before they are stored, logged or shown.

Redaction may hide too much: never use it on a value that the program reads again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from dagster_ckpt.errors import OptionError

HIDDEN = "***"

_NAME = (
    r"(?:password|passwd|passphrase|pwd|secret|token|credential|api[._-]?key|access[._-]?key|account[._-]?key"
    r"|private[._-]?key|shared[._-]?key|encryption[._-]?key|jaas|authorization|signature|user[._-]?info"
    r"|[._-]pass(?![a-z0-9]))"
)
_NAMED = rf"[\w.\-]*{_NAME}[\w.\-]*"
_SECRET_NAME = re.compile(rf"(?:{_NAMED}|(?:[\w.\-]*[._-])?(?:key|pass)|sig|sas|auth)", re.IGNORECASE)
_URL = re.compile(r"(?P<scheme>(?:[A-Za-z][A-Za-z0-9+.\-]*:)?//)(?P<rest>[^\s'\"<>`]+)")
# In these URLs the part before the `@` is a container.
_CONTAINERS = ("abfs://", "abfss://", "wasb://", "wasbs://")
# A backslash or a second quote escapes a quote. Without a closing quote, the rest of the line is the value.
_AFTER = r"(?=[\s,;)\]}'\"\\]|\Z)"
_QUOTED = "|".join(
    rf"\\{quote}(?:\\\\\\.|\\[^{quote}]|[^{quote}\\])*+\\{quote}{_AFTER}"
    rf"|{quote}(?:\\.|{quote}{quote}|[^{quote}\\])*+{quote}{_AFTER}"
    rf"|\\?{quote}[^{quote}]*{quote}|\\?{quote}[^{quote}\n]*"
    for quote in "'\""
)


def _group(begin: str, end: str) -> str:
    simple = nested = rf"{begin}[^{begin}{end}]*+{end}"
    for _ in range(3):
        nested = rf"{begin}(?:{_QUOTED}|[^{begin}{end}]|{nested})*+{end}"
    return f"{nested}|{simple}"


_GROUP = "|".join((_group(r"\{", r"\}"), _group(r"\[", r"\]")))
# A closing quote or bracket within a word belongs to it.
_BARE = r"(?:[^\s&;,'\")\]}\\]|['\")\]}](?=\w)|\\(?=[^\Wnrt]))+"
_VALUE = f"(?P<value>{_QUOTED}|{_GROUP}|{_BARE})"
_KEYWORD = re.compile(rf"(?P<name>\b(?:{_NAMED}|sig|sas))(?P<sign>\\?['\"]?\s*[=:]\s*|%3[Dd]){_VALUE}", re.IGNORECASE)
_OPTION = re.compile(rf"(?P<name>(?<![\w-])--?{_NAMED})(?P<sign>\s+){_VALUE}", re.IGNORECASE)
_SCHEME_AND_KEY = re.compile(r"\b(?P<name>bearer|basic)(?P<sign>\s+)(?P<value>[A-Za-z0-9._~+/=\-]{8,})", re.IGNORECASE)
_AWS_KEY = re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


def without_secrets(text: str, known: Iterable[str | None] = ()) -> str:
    """Redact user info in URLs, values with secret-sounding names, keys of well-known forms, and `known` secrets.

    Example:
        >>> without_secrets("cannot reach postgresql://me:a@b@host/db?sslpassword=x, with password=y")
        'cannot reach postgresql://***@host/db?sslpassword=***, with password=***'
    """
    for secret in sorted((each for each in known if each), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _PEM.sub(HIDDEN, text)
    text = _URL.sub(_hide_user, text)
    for named in (_SCHEME_AND_KEY, _KEYWORD, _OPTION):
        text = named.sub(_hide_value, text)
    return _AWS_KEY.sub(HIDDEN, text)


def shown_command(words: Sequence[str]) -> list[str]:
    """Redact the words of a command line, such as `--password x` and `fs.s3a.secret.key=x`."""
    shown: list[str] = []
    hides_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_named = names_a_secret(name.lstrip("-"))
        if hides_next:
            shown.append(HIDDEN)
        elif equals and is_named:
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(without_secrets(word))
        hides_next = not hides_next and not equals and word.startswith("-") and is_named
    return shown


def shown_settings(settings: Mapping[str, object]) -> dict[str, object]:
    return {
        name: HIDDEN if names_a_secret(name) else without_secrets(value) if isinstance(value, str) else value
        for name, value in settings.items()
    }


def names_a_secret(name: str) -> bool:
    return _SECRET_NAME.fullmatch(name) is not None


def user_info(url: str) -> tuple[str, str]:
    """Split a URL into one without user info, and the user info."""
    scheme, separator, rest = url.partition("://")
    if not separator or f"{scheme.lower()}://" in _CONTAINERS:
        return url, ""
    at = _end_of_user(rest)
    return (url, "") if at < 0 else (f"{scheme}://{rest[at + 1 :]}", rest[:at])


def refuse_user_info(option: str, url: str | None) -> None:
    """Raise OptionError if a location, which is stored and shown, has user info."""
    if url is not None and user_info(url)[1]:
        raise OptionError(
            f"{option} is {without_secrets(url)!r}, which contains a user name. Remove it: locations are stored and "
            "displayed. User name and password are taken from the configured storage on the same host, or from "
            "Spark's settings."
        )


def cause_to_show(error: BaseException) -> BaseException | None:
    """The error as a cause to chain; None if it or one of its causes contains a secret."""
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        text = str(current)
        if without_secrets(text) != text:
            return None
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return error


def _hide_user(found: re.Match[str]) -> str:
    scheme, rest = found["scheme"], found["rest"]
    if scheme.lower() in _CONTAINERS:
        return found[0]
    at = _end_of_user(rest)
    return found[0] if at < 0 else f"{scheme}{HIDDEN}@{rest[at + 1 :]}"


def _end_of_user(rest: str) -> int:
    """The index of the `@` that ends the user info after `://`, or -1.

    An unescaped password may contain `@`, `/`, `?` and `#`: then the last `@` counts.
    """
    end = next((index for index, letter in enumerate(rest) if letter in "/?#"), len(rest))
    authority = rest[:end]
    user, at, _ = authority.partition("@")
    if at:
        return rest.rfind("@") if ":" in user else authority.rfind("@")
    _, colon, port = authority.partition(":")
    is_password = bool(colon) and not port.isdigit() and not authority.startswith("[")
    return rest.rfind("@") if is_password else -1


def _hide_value(found: re.Match[str]) -> str:
    value = found["value"].lstrip("\\")
    quote = value[0] if value[0] in "'\"" else ""
    escape = "\\" if found["value"].startswith("\\") else ""
    hidden = f"{escape}{quote}{HIDDEN}{escape}{quote}" if quote else HIDDEN
    return f"{found['name']}{found['sign']}{hidden}"
