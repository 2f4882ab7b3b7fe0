"""Masking of secrets in records. Secrets are recognized by the preceding name or by their form."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"
_NAME = re.compile(
    r"(?i)(^|[-_.])(token|secret|password|passwd|pwd|passphrase|credentials?|(api|access|account|private|secret)[-_]?key)$"
)
_QUERY = re.compile(r"(?i)([?&](?:sig|signature|token|secret|password|[\w-]*key)=)[^&#\s]+")
_LOGIN = re.compile(r"(\w[\w+.-]*://)[^/@\s]+@")
_FORM = re.compile(r"\b(?:hf_|ghp_|github_pat_|glpat-|xox[abp]-|sk-|AKIA)[\w-]{12,}")


def mask(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with secrets replaced by ``***``.

    Example:
        >>> mask(["--lr", "0.1", "--api-key", "f00", "HF_TOKEN=f00", "sftp://me:f00@host/data"])
        ['--lr', '0.1', '--api-key', '***', 'HF_TOKEN=***', 'sftp://***@host/data']
    """
    masked: list[str] = []
    follows = False
    for word in words:
        name, equals, _ = word.partition("=")
        named = _NAME.search(name) is not None
        if follows and not word.startswith("--"):
            masked.append(MASK)
        elif named and equals:
            masked.append(f"{name}={MASK}")
        else:
            masked.append(_FORM.sub(MASK, _QUERY.sub(rf"\1{MASK}", _LOGIN.sub(rf"\1{MASK}@", word))))
        follows = named and not equals and name.startswith("-")
    return masked
