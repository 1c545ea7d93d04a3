"""The first revision.

A new catalog gets its tables from `dagster_ckpt.catalog.tables`; migrations are for those that exist.
"""

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
