"""Alembic migrations of the catalog. They are part of the package so that an installed wheel can migrate."""
