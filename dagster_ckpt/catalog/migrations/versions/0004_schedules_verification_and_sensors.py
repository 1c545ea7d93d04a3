"""Which schedule took a savepoint, what a verification found, and indexes for the questions that sensors ask."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("images", sa.Column("schedule", sa.Text()))
    op.add_column("images", sa.Column("verified_at_ms", sa.BigInteger()))
    op.add_column("images", sa.Column("verified_problem", sa.Text()))
    op.drop_index("ix_images_job_id_status", table_name="images")
    op.create_index("ix_images_job_id_status_number", "images", ["job_id", "status", "number"])
    op.create_index("ix_events_job_id_sequence", "events", ["job_id", "sequence"])
    op.create_index("ix_requests_status_kind", "requests", ["status", "kind"])


def downgrade() -> None:
    op.drop_index("ix_requests_status_kind", table_name="requests")
    op.drop_index("ix_events_job_id_sequence", table_name="events")
    op.drop_index("ix_images_job_id_status_number", table_name="images")
    op.create_index("ix_images_job_id_status", "images", ["job_id", "status"])
    op.drop_column("images", "verified_problem")
    op.drop_column("images", "verified_at_ms")
    op.drop_column("images", "schedule")
