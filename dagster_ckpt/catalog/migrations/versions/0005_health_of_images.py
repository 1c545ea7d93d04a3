"""Indexes for the questions of the health sensor."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_images_job_id_completed_at_ms", "images", ["job_id", "completed_at_ms"])
    op.create_index("ix_images_job_id_verified_at_ms", "images", ["job_id", "verified_at_ms"])


def downgrade() -> None:
    op.drop_index("ix_images_job_id_verified_at_ms", table_name="images")
    op.drop_index("ix_images_job_id_completed_at_ms", table_name="images")
