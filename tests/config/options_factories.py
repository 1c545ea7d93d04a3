"""Factories that the tests name by import path."""

from collections.abc import Mapping

from dagster_ckpt.config.rocksdb import RocksDBOptionsFactory

CACHE = "spark.sql.streaming.stateStore.rocksdb.blockCacheSizeMB"


class TwiceTheCache(RocksDBOptionsFactory):
    def create_settings(self, current: Mapping[str, str]) -> Mapping[str, int]:
        return {CACHE: 2 * int(current.get(CACHE, "8"))}


class NotSparks(RocksDBOptionsFactory):
    def create_settings(self, current: Mapping[str, str]) -> Mapping[str, int]:
        return {"blockCacheSizeMB": 4}


class NoFactory:
    pass
