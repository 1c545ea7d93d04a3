"""Every name that the client's package offers can be imported."""

from __future__ import annotations

import pytest

from dagster_ckpt import client


@pytest.mark.parametrize("name", client.__all__)
def test_a_name_is_there(name: str) -> None:
    assert getattr(client, name) is not None


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Unknown'"):
        _ = client.Unknown
