from collections.abc import Iterator

import pytest
from kafka_broker import Kafka, running_broker


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    with running_broker(tmp_path_factory.mktemp("kafka")) as kafka:
        yield kafka
