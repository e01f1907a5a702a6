"""This process's command line as `status` shows it: without what looks like a secret."""

from __future__ import annotations

import re
import sys

CHARACTERS_MAX = 256
HIDDEN = "***"

_NAMES_SECRET = re.compile(r"key|token|secret|passw|pwd|credential|auth|bearer|cookie", re.I)
_IS_SECRET = re.compile(
    r"(sk|pk|rk|rsk|ghp|gho|ghs|github_pat|glpat|xox[a-z]|AKIA|ASIA|hf|npm|pypi)[-_A-Z0-9][-_A-Za-z0-9.]{6,}$|eyJ[-_A-Za-z0-9.]{16,}$"
)
_RANDOM = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[-_A-Za-z0-9+=]{24,}$")
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def shown() -> str:
    """At most CHARACTERS_MAX characters that UTF-8 can say."""
    return without_secrets(sys.argv)[:CHARACTERS_MAX].encode("utf-8", "replace").decode()


def without_secrets(arguments: list[str]) -> str:
    """Joins the arguments. Hidden are the value of an option or assignment whose name speaks of a secret, what has the
    form of a known kind of token or looks random, and who signs in to a URL."""
    words = []
    is_value = False
    for word in arguments:
        name, equals, value = word.partition("=")
        names_secret = bool(_NAMES_SECRET.search(name))
        if is_value and not word.startswith("-"):
            words.append(HIDDEN)
        elif equals and (names_secret or _looks_secret(value)):
            words.append(f"{name}={HIDDEN}")
        elif _looks_secret(word):
            words.append(HIDDEN)
        else:
            words.append(_USER_OF_URL.sub(HIDDEN, word))
        is_value = word.startswith("-") and not equals and names_secret
    return " ".join(words)


def _looks_secret(word: str) -> bool:
    return bool(_IS_SECRET.match(word) or _RANDOM.match(word))
