"""Alembic's entry point: migrates over the connection that `upgrade` passes in."""

from alembic import context

from dagster_ckpt.catalog.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
