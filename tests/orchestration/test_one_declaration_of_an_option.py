"""An option that is declared once is seen in every face: keyword, description, Dagster config, a run, YAML, page."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pydantic import create_model

from dagster_ckpt.config import checkpoint_config
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.external_asset import external_streaming_asset
from dagster_ckpt.orchestration.settings import fields_of, unset_fields_of
from dagster_ckpt.orchestration.stream import NOT_IN_YAML, StreamOptions, StreamSpec, description_of
from dagster_ckpt.orchestration.streaming_asset import (
    streaming_asset,
    streaming_multi_asset,
)
from dagster_ckpt.orchestration.yaml_fields import in_yaml
from dagster_ckpt.orchestration.yaml_stream import StreamDeclaration
from dagster_ckpt.values.validation import Option, OptionDescription, WholeNumber


@dataclass(frozen=True, kw_only=True)
class WithLanterns(CheckpointOptions):
    lanterns: Option[int, int] = Option(
        WholeNumber("number of lanterns", minimum=2, maximum=9),
        default=3,
        description="Lanterns lit while a checkpoint is taken.",
        effect=("Spark sees them.", "It stays dark."),
    )


def test_as_a_keyword_it_is_checked_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_config, "CheckpointOptions", WithLanterns)
    config = CheckpointConfig(lanterns=5)  # type: ignore[call-arg]
    assert config.describe()[-1][:2] == ("lanterns", 5)
    assert isinstance(config.describe()[-1], OptionDescription)
    assert config.describe()[-1].explanation == "Spark sees them."
    with pytest.raises(OptionError, match="number of lanterns is 1, but must be a whole number from 2 to 9"):
        CheckpointConfig(lanterns=1)  # type: ignore[call-arg]


def test_dagster_offers_it_to_an_asset_to_a_run_and_in_yaml() -> None:
    settings: Any = create_model("Settings", __base__=dg.Config, **fields_of(WithLanterns))
    overrides: Any = create_model("Overrides", __base__=dg.Config, **unset_fields_of(WithLanterns))
    assert settings().lanterns == 3
    assert overrides().lanterns is None
    assert settings.model_fields["lanterns"].description == "Lanterns lit while a checkpoint is taken. At least 2."
    assert "lanterns" in settings.to_config_schema().as_field().config_type.fields
    in_file: Any = in_yaml(settings, WithLanterns).model_field_type
    assert "lanterns" in in_file.model_json_schema()["properties"]


def test_a_run_overrides_it() -> None:
    assert WithLanterns(interval=60_000).overridden({"lanterns": 4, "interval": None}) == WithLanterns(
        interval=60_000, lanterns=4
    )


def test_the_page_has_a_row_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[2] / "docs" / "options_page.py"
    spec = importlib.util.spec_from_file_location("options_page", path)
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    monkeypatch.setattr(page, "CheckpointOptions", WithLanterns)
    assert (
        "| `lanterns` |  | `3` | a whole number from 2 to 9 | Lanterns lit while a checkpoint is taken. |"
        in page.page()
    )


def test_each_option_of_a_stream_is_a_keyword_of_its_makers_and_a_field_in_yaml() -> None:
    fields = StreamDeclaration.model().model_fields
    for option in StreamOptions.__annotations__:
        if option in NOT_IN_YAML:
            # Functions that are reviewed with the code that needs them.
            assert option not in fields
        else:
            assert description_of(option) in (fields[option].description or ""), option
        made = StreamSpec.of("orders", **{option: None})  # type: ignore[misc]
        assert made.stream_id == "orders"


@pytest.mark.parametrize(
    "make",
    [
        lambda **given: StreamSpec.of("orders", **given),
        streaming_asset,
        lambda **given: streaming_multi_asset(specs=[], **given),
        lambda **given: external_streaming_asset("orders", **given),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest_one(make: Any) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'checkpoint'. Did you mean checkpointing\?"):
        make(checkpoint=3)


def test_names_that_nobody_knows_are_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"CheckpointConfig\(\).*'intervall'\. Did you mean interval\?"):
        CheckpointConfig(intervall=5000)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="each of streams is 'orders'"):
        stream_definitions("orders")  # type: ignore[arg-type]
