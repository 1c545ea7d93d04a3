"""Alembic migrations of the catalog, part of the package so that an installed wheel can migrate."""
