"""Names of policies for logs, reasons and pages."""

from __future__ import annotations


def policy_name(policy: object) -> str:
    """Return a policy as text: its `repr` if its class defines one, otherwise the name of its class.

    Example:
        >>> class Own:
        ...     pass
        >>> policy_name(Own()), policy_name(3)
        ('Own()', '3')
    """
    if type(policy).__repr__ is object.__repr__:
        return f"{type(policy).__name__}()"
    try:
        return repr(policy)
    except Exception:  # noqa: BLE001 - a user's `__repr__` must not hide what the policy decided
        return f"{type(policy).__name__}()"
